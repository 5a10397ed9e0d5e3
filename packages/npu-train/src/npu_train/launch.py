"""Start a run: in this process, or in several through torchrun, which is the engine; nothing here takes its place."""

import argparse
import contextlib
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from .errors import EXIT_PROBLEM, EXIT_UNUSABLE_INPUT, InputError
from .files import unwritable

# torchrun's options that are passed on; True where one takes a value.
TORCHRUN_OPTIONS = {
    "--nnodes": True,
    "--node-rank": True,
    "--rdzv-backend": True,
    "--rdzv-endpoint": True,
    "--rdzv-id": True,
    "--rdzv-conf": True,
    "--master-addr": True,
    "--master-port": True,
    "--local-addr": True,
    "--max-restarts": True,
    "--monitor-interval": True,
    "--standalone": False,
    "--log-dir": True,
    "--redirects": True,
    "--tee": True,
    "--local-ranks-filter": True,
    "--numa-binding": True,
    "--role": True,
    "--start-method": True,
    "--signals-to-handle": True,
    "--shutdown-timeout": True,
    "--logs-specs": True,
    "--duplicate-stdout-filters": True,
    "--duplicate-stderr-filters": True,
    "--virtual-local-rank": False,
}
_RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")
_ELASTIC_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def is_count(text: str) -> bool:
    """Whether ``text`` is a number of processes or machines."""
    return re.fullmatch("[0-9]{1,9}", text) is not None


@dataclass(frozen=True)
class Launch:
    """How many processes, where.

    Attributes:
        nproc: Processes on this machine: a number, or a word that torchrun understands (auto, cpu, gpu).
        torchrun: torchrun's own options, as given.
    """

    nproc: str
    torchrun: tuple[str, ...]

    @property
    def _nodes(self) -> str:
        return self.torchrun[self.torchrun.index("--nnodes") + 1] if "--nnodes" in self.torchrun else "1"

    @property
    def multi_node(self) -> bool:
        return self._nodes not in ("1", "1:1")

    @property
    def in_process(self) -> bool:
        return self.nproc == "1" and not self.torchrun

    @property
    def world_size(self) -> int | None:
        """Processes in all, or None where only torchrun will know."""
        nodes = self._nodes
        return int(nodes) * int(self.nproc) if is_count(nodes) and is_count(self.nproc) else None


def inherited_world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """The world size where torchrun or another elastic launcher has started this process already, else None.

    Raises:
        InputError: only some of the launcher's variables are set, or they are not numbers.
    """
    present = [name for name in _ELASTIC_ENVIRONMENT if name in environ]
    if not present:
        return None
    absent = [name for name in (*_ELASTIC_ENVIRONMENT, "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if absent:
        raise InputError(
            f"the launcher's environment is incomplete: {', '.join(present)} set, {', '.join(absent)} missing. "
            "Start with torchrun, or unset them and use --nproc."
        )
    try:
        return int(environ["WORLD_SIZE"])
    except ValueError:
        raise InputError(f"WORLD_SIZE={environ['WORLD_SIZE']} is not a number. Start with torchrun.") from None


def set_threads(nproc: int) -> None:
    """Share the cores: several processes with a full set of threads each slow one another down many times over."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))


def single_process_environment() -> None:
    """The variables of a world of one; port 0 lets the store take a free one."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def _describe_failure(rank: int, exit_code: int) -> str:
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        hint = " (the kernel's out-of-memory killer uses it too: see dmesg)" if name == "SIGKILL" else ""
        return f"rank {rank} was killed by {name}{hint}"
    return f"rank {rank} ended with exit code {exit_code}"


def _parse(launch: Launch, options: list[str], worker_args: list[str]) -> argparse.Namespace:
    from torch.distributed import run

    words = [*options, "--nproc-per-node", launch.nproc, "--module", "npu_train.worker", *worker_args]
    shown = io.StringIO()
    try:
        # argparse prints its usage and exits.
        with contextlib.redirect_stderr(shown):
            return run.parse_args(words)
    except SystemExit:
        message = (shown.getvalue().strip().splitlines() or ["its options are refused"])[-1]
        raise InputError(f"torchrun: {message.partition('error: ')[2] or message}.") from None


def torchrun_problems(launch: Launch) -> list[str]:
    """What torchrun would refuse, found without starting or writing anything."""
    from torch.distributed import run

    if is_count(launch.nproc):
        set_threads(int(launch.nproc))
    try:
        arguments = _parse(launch, list(launch.torchrun), [])
    except InputError as error:
        return error.problems
    problems = []
    known = [*_RENDEZVOUS, *(plugin.name for plugin in entry_points(group="torchrun.handlers"))]
    if arguments.rdzv_backend not in known:
        problems.append(f"torchrun: unknown --rdzv-backend '{arguments.rdzv_backend}'. Known: {', '.join(known)}.")
    if arguments.log_dir:
        problems += unwritable(Path(arguments.log_dir), "log folder", "--log-dir")
    # Else the folder would be made.
    arguments.log_dir = os.devnull
    before = logging.root.manager.disable
    try:
        # The run itself will say it again.
        logging.disable(logging.CRITICAL)
        run.config_from_args(arguments)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        problems.append(f"torchrun: {error}. See torchrun --help.")
    finally:
        logging.disable(before)
    return problems


def torchrun(launch: Launch, worker_args: list[str], kept: Callable[[], str]) -> int:
    """Run ``npu_train.worker`` under torchrun and return the exit code of the run.

    Args:
        launch: How many processes, where.
        worker_args: Arguments of each process.
        kept: Says what there is to go on from, once the run has ended badly.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if is_count(launch.nproc):
        set_threads(int(launch.nproc))
    rendezvous = ("--rdzv", "--master", "--standalone", "--node-rank")
    options = list(launch.torchrun)
    if not launch.multi_node:
        if not any(option.startswith(rendezvous) for option in options):
            options.append("--standalone")
        # One machine talks to itself: its own name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    arguments = _parse(launch, options, worker_args)
    try:
        run.run(arguments)
    except SignalException as error:
        print(f"npu-train: ended by {error.sigval.name}; the processes were stopped.", file=sys.stderr, flush=True)
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code == EXIT_UNUSABLE_INPUT:
            return EXIT_UNUSABLE_INPUT
        print(
            f"npu-train: {_describe_failure(rank, code)}; the other processes were stopped. "
            f"What it printed is above. {kept()}",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_PROBLEM
    return 0
