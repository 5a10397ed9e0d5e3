"""`npu-debug sim`: run a program on simulated devices."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from npu_debug.errors import InputError

from .build import library_folder
from .settings import Settings

SITE = Path(__file__).parent / "site"
# torch_npu, which torch loads by itself, has imported the module by then, and Python warns of that.
LAUNCHER = ["-W", "ignore:'torch.distributed.run' found:RuntimeWarning", "-m", "torch.distributed.run"]
_RENDEZVOUS = ("--standalone", "--rdzv", "--master", "--nnodes", "--node-rank", "--node_rank")


def command_line(command: Sequence[str], nproc: int | None) -> list[str]:
    """The command to start, in ``nproc`` processes by torchrun where a number is given.

    Args:
        command: What the user wrote after ``--``.
        nproc: Processes on this machine, or None to run the command as it is.

    Raises:
        InputError: there is no command, or it cannot be started in several processes.
    """
    if not command:
        raise InputError("There is no program to run. Write it after --: npu-debug sim -- python my_script.py")
    command = list(command)
    name = os.path.basename(command[0])
    if name.endswith(".py"):
        command, name = [sys.executable, *command], "python"
    rest = command[1:]
    if nproc is None:
        if name == "torchrun":
            _check_one_machine(rest)
        return command
    if name.startswith("python"):
        while rest and rest[0] == "-u":  # torchrun starts Python with it
            rest = rest[1:]
        if rest[:2] == ["-m", "torch.distributed.run"]:
            rest = rest[2:]
        elif rest[:2] == ["-m", "torch.distributed.launch"]:
            raise InputError("--nproc starts the processes by torchrun. Write torchrun, not torch.distributed.launch.")
        elif not rest or (rest[0].startswith("-") and rest[0] != "-m"):
            raise InputError(
                f"--nproc starts a script or -m MODULE in several processes; {' '.join(command)} is neither. Options "
                "of Python itself are given as variables: PYTHONWARNINGS=error for -W error, PYTHONOPTIMIZE=1 for -O."
            )
        elif rest[0] == "-m":
            rest = ["--module", *rest[1:]]
    elif name != "torchrun":
        raise InputError(
            f"--nproc starts torchrun or a Python script, and {command[0]} is neither. Leave --nproc out and start the "
            "processes yourself."
        )
    if any(part.split("=")[0] in ("--nproc-per-node", "--nproc_per_node") for part in rest):
        raise InputError(
            "The number of processes is given twice, by --nproc and by torchrun's own --nproc-per-node. Leave one out."
        )
    _check_one_machine(rest)
    alone = [] if any(part.startswith(_RENDEZVOUS) for part in rest) else ["--standalone"]
    return [sys.executable, *LAUNCHER, *alone, "--nproc-per-node", str(nproc), *rest]


def _check_one_machine(arguments: Sequence[str]) -> None:
    for index, part in enumerate(arguments):
        option, _, value = part.partition("=")
        if option.endswith(".py"):
            return  # the rest is the script's
        if option == "--nnodes":
            value = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
            if value not in ("1", "1:1"):
                raise InputError(
                    f"Simulated devices of a job are on one machine. Leave --nnodes {value} out, and give --nproc all "
                    "the processes."
                )


def environment(settings: Settings) -> dict[str, str]:
    """This process's environment with the simulated devices of ``settings`` for every Python in it."""
    result = {**os.environ, **settings.environment()}
    result["PYTHONPATH"] = os.pathsep.join(
        [str(SITE), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    )
    # The program sees what it would see on a machine with CANN: torch loads torch_npu by itself, and no CUDA device.
    result["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    result["CUDA_VISIBLE_DEVICES"] = ""
    # Processes of a job on one machine talk over the loop-back interface; its own name need not resolve.
    result.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return result


def run(command: Sequence[str], settings: Settings, nproc: int | None) -> NoReturn:
    """Become the program. Signals and its exit code are its own.

    Raises:
        InputError: it cannot be started.
    """
    line = command_line(command, nproc)
    program = shutil.which(line[0])
    if program is None:
        raise InputError(f"The program {line[0]} was not found on PATH. Check its name, or give its path.")
    if settings.devices < (nproc or 1):
        raise InputError(
            f"--nproc {nproc} needs {nproc} devices, and there are {settings.devices}. Give --devices {nproc}."
        )
    script = next((part for part in line if part.endswith(".py")), None)
    if nproc is not None and script is not None and not os.path.isfile(script):
        # Each process would say so, in a page of torchrun's.
        raise InputError(f"The script {script} does not exist. Check its name and the current folder.")
    # Built here, once, so that a missing compiler is told before anything starts.
    library_folder()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, line, environment(settings))
