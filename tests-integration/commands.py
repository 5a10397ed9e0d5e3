"""The installed commands, as a user runs them."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "OMP_NUM_THREADS")}
    return {**inherited, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}


def _options(cwd: Path, more: dict[str, str]) -> dict[str, Any]:
    return {
        "cwd": cwd,
        "env": environment(**more),
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }


def start(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen:
    # A script that runs in the background has its children ignore Ctrl-C.
    heed_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(arguments, preexec_fn=heed_interrupts, **_options(cwd, more))


def run(*arguments: str, cwd: Path, timeout: float = 300, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, timeout=timeout, **_options(cwd, more))
