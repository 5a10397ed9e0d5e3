"""torch.distributed on simulated NPUs: real torch_npu and its process group, as `npu-debug sim` starts them."""

import json
import pickle
import pickletools
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest
from commands import run, start

pytestmark = pytest.mark.sim(in_process=False)

SCRIPTS = Path(__file__).parent / "sim_scripts"
# As torchrun sets it: two cores serve up to four ranks.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def sim(folder: Path, *arguments: str) -> str:
    done = run("npu-debug", "sim", *arguments, cwd=folder, timeout=180, **ONE_THREAD)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def assert_checks(folder: Path, name: str, at_least: int) -> None:
    lines = [json.loads(line) for line in (folder / f"checks-{name}.jsonl").read_text().splitlines()]
    failed = {line["check"]: line["detail"] for line in lines if not line["ok"]}
    assert failed == {}
    assert len(lines) >= at_least


# ---- collectives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_are_those_of_gloo(tmp_path: Path, ranks: int) -> None:
    script = [str(SCRIPTS / "collectives.py"), str(tmp_path)]
    sim(tmp_path, *(["--nproc", "2", "--", *script] if ranks == 2 else ["--", *script, str(ranks)]))
    for rank in range(ranks):
        assert_checks(tmp_path, str(rank), at_least=470)


# ---- data parallelism, DTensor, checkpoints ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    sim(folder, "--", "python", str(SCRIPTS / "parallel.py"), str(folder))
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_parallelism_is_one_process_on_the_cpu(parallel: Path, rank: int) -> None:
    assert_checks(parallel, str(rank), at_least=50)


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(parallel: Path) -> None:
    assert_checks(parallel, "alone", at_least=14)


# ---- failures ------------------------------------------------------------------------------------------------------


def _leaked(before: set[str]) -> set[str]:
    """New files in /dev/shm that no process uses; other jobs of the machine come and go meanwhile."""
    new = {file.name for file in Path("/dev/shm").iterdir()} - before
    for maps in Path("/proc").glob("[0-9]*/maps") if new else []:
        try:
            text = maps.read_text()
        except OSError:
            continue
        new = {name for name in new if f"/dev/shm/{name}" not in text}
    return new


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    before = {file.name for file in Path("/dev/shm").iterdir()}
    sim(folder, "--", "python", str(SCRIPTS / "failures.py"), str(folder))
    assert _leaked(before) == set()
    return folder


def _ends(failures: Path, name: str) -> dict[str, tuple[int, float]]:
    return {rank: tuple(end) for rank, end in json.loads((failures / f"{name}.json").read_text()).items()}


def test_the_watchdog_ends_a_rank_that_waits_for_one_that_never_comes(failures: Path) -> None:
    code, seconds = _ends(failures, "missing")["0"]
    output = (failures / "missing-0.txt").read_text()
    assert code == -signal.SIGABRT, output
    assert seconds < 60
    assert "Watchdog caught collective operation timeout: WorkHCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=5" in output
    assert "taking the entire process down" in output


def test_its_flight_recorder_tells_what_was_pending(failures: Path) -> None:
    dump = (failures / "missing-dump-0").read_bytes()
    # Only what needs no import: a reader can load it without trusting the writer.
    assert not {opcode.name for opcode, _, _ in pickletools.genops(dump)} & {"GLOBAL", "STACK_GLOBAL", "REDUCE"}
    recorded = pickle.loads(dump)
    assert recorded["pg_status"]["0"] == {
        "last_enqueued_collective": 2,
        "last_started_collective": 2,
        "last_completed_collective": 1,
    }
    first, second = recorded["entries"]
    assert (first["collective_seq_id"], first["state"], first["retired"]) == (1, "completed", True)
    assert (second["collective_seq_id"], second["state"], second["retired"]) == (2, "scheduled", False)
    assert (second["input_sizes"], second["input_dtypes"], second["timeout_ms"]) == ([[5]], ["Float"], 4000)
    names = [frame["name"] for frame in second["frames"]]
    assert names.index("all_reduce") < names.index("innermost_call") < names.index("missing")
    frame = second["frames"][names.index("innermost_call")]
    source = (SCRIPTS / "failures.py").read_text().splitlines()
    assert frame["filename"] == str(SCRIPTS / "failures.py")
    assert source[frame["line"] - 1].strip() == "dist.all_reduce(x)"
    # The other rank dumps on the same signal: it never came to the second collective.
    other = pickle.loads((failures / "missing-dump-1").read_bytes())
    assert [entry["collective_seq_id"] for entry in other["entries"]] == [1]


def test_ranks_that_do_not_agree_are_named(failures: Path) -> None:
    outputs = [(failures / f"mismatch-{rank}.txt").read_text() for rank in range(2)]
    said = [line for output in outputs for line in output.splitlines() if "the ranks do not agree" in line]
    assert len(said) == 1, outputs
    assert "HcclAllReduce(count 4, fp32, sum) on rank 0, HcclAllGather(count 4, fp32) on rank 1" in said[0]
    assert {code for code, _ in _ends(failures, "mismatch").values()} == {-signal.SIGABRT}
    for output, kind in zip(outputs, ("ALLREDUCE", "ALLGATHER"), strict=True):
        assert f"Watchdog caught collective operation timeout: WorkHCCL(SeqNum=2, OpType={kind}" in output


def test_a_killed_rank_is_named_by_the_other(failures: Path) -> None:
    ends = _ends(failures, "killed")
    assert ends["1"][0] == -signal.SIGKILL
    code, seconds = ends["0"]
    output = (failures / "killed-0.txt").read_text()
    assert code == 1, output
    assert seconds < 60
    assert "rank 0 of 2 timed out in operation 21, HcclAllReduce(count 1000, fp32, sum), after 4 s" in output
    error = output.rpartition("RuntimeError")[2]
    assert "no sign of rank(s) 1 (its process" in error
    assert "is gone)" in error


# ---- a user's script -----------------------------------------------------------------------------------------------


def _losses(output: str) -> list[float]:
    losses = [float(line.split()[2]) for line in output.splitlines() if line.startswith("loss ")]
    assert len(losses) == 6, output
    assert losses[-1] < 0.1 < losses[0]
    assert "accuracy 1.0" in output
    return losses


def test_a_users_script(tmp_path: Path) -> None:
    script, file, trace = str(SCRIPTS / "user_training.py"), str(tmp_path / "model.pt"), tmp_path / "trace.jsonl"
    two = sim(tmp_path, "--trace", str(trace), "--nproc", "2", "--", "torchrun", script, file)
    one = sim(tmp_path, "--", "python", script, file)
    assert "devices 8 Ascend910B1" in one
    assert "RuntimeWarning" not in two
    # In float16 the order of a sum shows.
    assert _losses(two) == pytest.approx(_losses(one), rel=1e-2)

    counted: dict[tuple[str, int], int] = defaultdict(int)
    for line in trace.read_text().splitlines():
        call = json.loads(line)
        if "bytes" in call and call["call"].startswith("Hccl"):
            counted[call["call"], call["rank"]] += call["bytes"]
    # FSDP hands its shard of every float32 parameter in before each layer's forward and backward, and once more for the
    # saved state; and the whole gradient once.
    parameters = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4
    for rank in range(2):
        assert counted["HcclAllGather", rank] == (2 * 6 + 1) * parameters // 2 * 4
        assert counted["HcclReduceScatter", rank] == 6 * parameters * 4


def _until(process: subprocess.Popen, text: str) -> str:
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith(text):
            return output
    raise AssertionError(output)


def test_memory_devices_and_signals(tmp_path: Path) -> None:
    options = ["--memory", "256MiB", "--soc", "Ascend910_9391", "--devices", "2"]
    line = ["npu-debug", "sim", *options, "--", "python", str(SCRIPTS / "user_memory.py")]
    signals = [signal.SIGTERM, signal.SIGINT]
    processes = [start(*line, cwd=tmp_path, **ONE_THREAD) for _ in signals]
    for process, number in zip(processes, signals, strict=True):
        output = _until(process, "ready")
        assert "devices 2 Ascend910_9391" in output
        assert f"memory {256 * 2**20}" in output
        assert "caught NPU out of memory. Tried to allocate" in output
        assert "256.00 MiB total capacity" in output
        assert f"sum {200.0 * 2**20 / 4}" in output
        process.send_signal(number)
        begun = time.monotonic()
        process.communicate(timeout=60)
        assert time.monotonic() - begun < 40
        assert process.returncode == -number


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_the_scripts(tmp_path: Path, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.exit({code})\n")
    done = run("npu-debug", "sim", "--", "python", str(script), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
