"""The installed commands, as a user runs them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "OMP_NUM_THREADS")}
    return {**inherited, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}


def start(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        arguments,
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A script that runs in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(*arguments: str, cwd: Path, timeout: float = 300, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        arguments,
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
