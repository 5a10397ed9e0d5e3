"""Runs of several processes under the real torchrun: started by us, by the user, on two nodes, and when one dies."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from commands import run, start
from ranks import RankServer

SHORT = ["--training.seq-len", "64", "--training.local-batch-size", "1", "--metrics.log-freq", "1", "--device", "cpu"]
SHORT += ["--validator.no-enable"]


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "event" not in line}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    done = run("npu-train", "run", "quickstart", "--nproc", "2", "--training.steps", "2", *SHORT, cwd=folder)
    assert done.returncode == 0, done.stdout
    assert "dp_shard 2" in done.stdout
    assert "sample of step 2" in done.stdout
    assert "npu-train run quickstart --device cpu --nproc 2 --resume --training.steps 4" in done.stdout
    return folder / "outputs" / "quickstart"


def test_nproc(two_processes: Path) -> None:
    assert sorted(losses(two_processes)) == [1, 2]


def test_users_own_torchrun(two_processes: Path, tmp_path: Path) -> None:
    done = run(
        *("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "npu_train", "run", "quickstart"),
        *("--training.steps", "2", "--dump-folder", "run"),
        *SHORT,
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout
    assert losses(tmp_path / "run") == losses(two_processes)


def test_two_nodes(two_processes: Path, tmp_path: Path) -> None:
    """Two agents of one process each meet at a rendezvous, as two machines would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    nodes = [
        start(
            *("npu-train", "run", "quickstart", "--nnodes", "2", "--nproc", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", endpoint, "--rdzv-id", "test", "--local-addr", "127.0.0.1"),
            *("--dump-folder", "run", "--training.steps", "2"),
            *SHORT,
            cwd=tmp_path,
            GLOO_SOCKET_IFNAME="lo",
        )
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert losses(tmp_path / "run") == losses(two_processes)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_process_ends_the_others_and_spoils_no_checkpoint(ranks: RankServer, tmp_path: Path) -> None:
    arguments = ["npu-train", "run", "quickstart", *SHORT, "--checkpoint.interval", "5"]
    job = start(*arguments, "--nproc", "2", "--training.steps", "100000", cwd=tmp_path)
    folder = tmp_path / "outputs" / "quickstart"
    try:
        deadline = time.monotonic() + 240
        while not (folder / "checkpoint" / "step-10" / ".metadata").exists():
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = _children(job.pid)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        begin = time.monotonic()
        output = job.communicate(timeout=60)[0]
        print(f"ended after {time.monotonic() - begin:.1f} s")
    finally:
        if job.poll() is None:
            job.kill()
    assert job.returncode == 1
    assert "rank 1 was killed by SIGKILL" in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)

    # What was being written when it died is no checkpoint; the newest finished one is.
    unfinished = folder / "checkpoint" / "step-999995"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    steps = [int(path.name[5:]) for path in (folder / "checkpoint").glob("step-*") if (path / ".metadata").exists()]
    done = ranks.command(*arguments, "--resume", "--training.steps", str(max(steps) + 1), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert f"ignoring outputs/quickstart/checkpoint/{unfinished.name}: it was not finished" in done.stdout
    assert f"resuming after step {max(steps)}" in done.stdout


def test_one_run_writes_to_a_folder_and_can_be_interrupted(ranks: RankServer, tmp_path: Path) -> None:
    endless = ["--training.steps", "100000", "--checkpoint.interval", "100000"]
    job = start("npu-train", "run", "quickstart", *SHORT, *endless, cwd=tmp_path)
    try:
        for line in job.stdout:
            if line.startswith("step      2/"):
                break
        another = ["npu-train", "run", "quickstart", *SHORT, "--dump-folder", "outputs/quickstart"]
        for nproc in ("1", "2"):
            refused = ranks.command(*another, "--nproc", nproc, cwd=tmp_path)
            assert refused.returncode == 2, refused.stdout
            assert f"another run is writing to outputs/quickstart (process {job.pid} on " in refused.stdout
        job.send_signal(signal.SIGINT)
        rest = job.communicate(timeout=240)[0]
    finally:
        job.kill()
    assert job.returncode == 130, rest
    assert "interrupted. There is no checkpoint of this run." in rest
    assert "Traceback" not in rest


def test_own_data_then_sample(ranks: RankServer, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("to be or not to be, that is the question. " * 200)
    done = ranks.command(
        *("npu-train", "run", "quickstart", "--data", "my.txt", "--training.steps", "5", "--metrics.log-freq", "1"),
        *("--training.seq-len", "64", "--device", "cpu"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "validation is off" in done.stdout
    assert sorted(losses(tmp_path / "outputs" / "quickstart")) == [1, 2, 3, 4, 5]
    command = ["npu-train", "sample", "--checkpoint", "outputs/quickstart", "--prompt", "to be", "--json"]
    texts = []
    # As it is installed, where nothing was imported for the training before; and again.
    for call in (run, ranks.command):
        sampled = call(*command, "--max-new-tokens", "8", "--seed", "3", cwd=tmp_path)
        assert sampled.returncode == 0, sampled.stdout
        texts.append(json.loads(sampled.stdout.splitlines()[-1]))
    assert texts[0] == texts[1]
    assert texts[0]["step"] == 5
    assert texts[0]["text"].startswith("to be")
    # Data and checkpoint are found again from where the run was started, whatever the folder is called.
    log = run("npu-debug", "logs", "outputs/quickstart", "--plot", "loss.svg", cwd=tmp_path)
    assert log.returncode == 0, log.stdout
    assert (tmp_path / "loss.svg").read_text().lstrip().startswith("<?xml")
