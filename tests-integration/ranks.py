"""Run training jobs and commands as real processes: one server imports torchtitan once, and forks them.

A job under torchrun spends most of its time importing; the tests about torchrun itself use it, all others this.
The ranks are what torchrun would start: `npu_train.worker.guarded` with RANK, WORLD_SIZE and MASTER_PORT set.
"""

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Job:
    """A finished job: exit codes by rank, everything the ranks printed, and the lines of its metrics.jsonl."""

    codes: list[int]
    output: str
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def column(self, name: str) -> dict[int, float]:
        """`name` by step; the last line of a step counts."""
        return {line["step"]: line[name] for line in self.lines if "event" not in line}

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == name]


class RankServer:
    """Client of the forking server process.

    Args:
        device: What its jobs train on: ``cpu`` or ``sim``.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(Path(__file__).parent),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, request: dict[str, Any], world_size: int, timeout: float = 300) -> Job:
        folder = Path(request["dump_folder"])
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"output-{time.monotonic_ns()}.txt"
        request = {"device": self.device, **request}
        codes = self._fork({"request": request, "world_size": world_size, "timeout": timeout, "log": str(log)})
        return Job(codes, log.read_text(), folder)

    def command(
        self, *arguments: str, cwd: Path, largest_file: int | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess:
        """What `commands.run` does, for npu-train and npu-debug, less the start of Python and the imports.

        Args:
            arguments: The command line.
            cwd: Where it runs.
            largest_file: Bytes of the largest file that it may write.
            timeout: Seconds.
        """
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "output.txt"
            job = {"arguments": arguments, "cwd": str(cwd), "largest_file": largest_file}
            (code,) = self._fork({**job, "world_size": 1, "timeout": timeout, "log": str(log)})
            return subprocess.CompletedProcess(arguments, code, log.read_text())

    def _fork(self, job: dict[str, Any]) -> list[int]:
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the rank server died with exit code {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _command(job: dict[str, Any]) -> int:
    import npu_debug.cli
    import npu_train.cli

    os.chdir(job["cwd"])
    if job["largest_file"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    program, *arguments = job["arguments"]
    return {"npu-train": npu_train.cli.main, "npu-debug": npu_debug.cli.main}[program](arguments)


def _rank(rank: int, world_size: int, port: int, job: dict[str, Any]) -> int:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from npu_train.request import RunRequest
    from npu_train.worker import guarded

    return guarded(RunRequest.from_json(json.dumps(job["request"])), world_size)


def _become(rank: int, world_size: int, port: int, job: dict[str, Any]) -> None:
    with open(job["log"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torchtitan.trainer

    # At the end rank 0, which holds the store, sleeps 2 s so that the others are done with it. On one machine they are
    # much sooner, and there are a hundred jobs.
    torchtitan.trainer.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(min(seconds, 0.3))})
    code = 1
    try:
        code = _command(job) if "arguments" in job else _rank(rank, world_size, port, job)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the exit handlers of the server, which belong to the parent.
    os._exit(code)


def _serve() -> None:
    from npu_train.device import select_device

    device = select_device(sys.argv[1])
    import torchtitan.models.deepseek_v3.config_registry
    import torchtitan.models.llama3.config_registry  # noqa: F401

    import npu_debug.cli  # noqa: F401
    import npu_train.check
    import npu_train.cli
    import npu_train.configs
    import npu_train.overrides.attention
    import npu_train.overrides.checkpoint
    import npu_train.overrides.metrics
    import npu_train.sample
    import npu_train.worker

    # The reader of options imports and remembers more with each kind of field.
    for model in ("llama3", "deepseek_v3"):
        npu_train.configs.parse(model, f"{model}_debugmodel", [], device.type)
    # What was imported stays: no collection in a forked process need look at it, and copy its pages by that.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(job["world_size"]):
            child = os.fork()
            if child == 0:
                _become(rank, job["world_size"], port, job)
            children.append(child)
        deadline = time.monotonic() + job["timeout"]
        codes: list[int | None] = [None] * len(children)
        while None in codes:
            for rank, child in enumerate(children):
                if codes[rank] is None:
                    done, status = os.waitpid(child, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            failed = any(code not in (None, 0) for code in codes)
            if failed:
                # What torchrun does: one rank's end is the end of the job; the others get a moment to say why.
                deadline = min(deadline, time.monotonic() + 5)
            if time.monotonic() > deadline:
                for rank, child in enumerate(children):
                    if codes[rank] is None:
                        os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    _serve()
