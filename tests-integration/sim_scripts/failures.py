"""Jobs of two ranks that go wrong, at the same time: what each rank's end is, is told in `FOLDER/NAME.json`.

torchrun would end the other ranks as soon as one fails, so the ranks are forked here: each must come to its own end.
"""

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from forks import fork

WORLD = 2
LIMIT = 90


def innermost_call(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def missing(rank: int) -> None:
    """Rank 1 does not come to the second collective."""
    x = torch.ones(5, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        time.sleep(LIMIT)
    innermost_call(x)
    torch.npu.synchronize()


def mismatch(rank: int) -> None:
    x = torch.ones(4, device="npu")
    dist.barrier()
    if rank == 0:
        dist.all_reduce(x)
    else:
        dist.all_gather_single(torch.empty(8, device="npu"), x)
    torch.npu.synchronize()


def killed(rank: int) -> None:
    x = torch.ones(1000, device="npu")
    for turn in range(1000):
        dist.all_reduce(x)
        torch.npu.synchronize()
        if rank == 1 and turn == 20:
            os.kill(os.getpid(), signal.SIGKILL)


# What runs, seconds that the process group allows, and the variables of its ranks.
JOBS: dict[str, tuple[Callable[[int], None], int, dict[str, str]]] = {
    "missing": (
        missing,
        4,
        {
            "TORCH_HCCL_TRACE_BUFFER_SIZE": "100",
            "TORCH_HCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_HCCL_ENABLE_MONITORING": "1",
            "TORCH_HCCL_WAIT_TIMEOUT_DUMP_MILSEC": "30000",
            # So long the watchdog waits, once the dump is ordered, before it ends the process.
            "TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC": "15",
        },
    ),
    "mismatch": (mismatch, 4, {}),
    # HCCL's own time-out ends this one; the group's would take longer than the test.
    "killed": (killed, 60, {"HCCL_EXEC_TIMEOUT": "4"}),
}


def _rank(name: str, rank: int, folder: Path) -> None:
    run, seconds, variables = JOBS[name]
    output = os.open(folder / f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables, TORCH_HCCL_DEBUG_INFO_TEMP_FILE=str(folder / f"{name}-dump-"))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.npu.set_device(rank)
    dist.init_process_group(
        "hccl",
        init_method=f"file://{folder / name}.store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=seconds),
    )
    run(rank)


def main() -> None:
    folder = Path(sys.argv[1])
    started = time.monotonic()
    ranks: dict[int, tuple[str, int]] = {}
    for name in JOBS:
        for rank in range(WORLD):
            ranks[fork(partial(_rank, name, rank, folder))] = (name, rank)
    ends: dict[str, dict[int, tuple[int, float]]] = {name: {} for name in JOBS}
    # The rank that never comes is not waited for.
    sleeper = next(child for child, job in ranks.items() if job == ("missing", 1))
    while ranks:
        done, status = os.waitpid(-1, os.WNOHANG)
        seconds = time.monotonic() - started
        if done:
            name, rank = ranks.pop(done)
            ends[name][rank] = (os.waitstatus_to_exitcode(status), seconds)
        elif set(ranks) == {sleeper} or seconds > LIMIT:
            for child in ranks:
                os.kill(child, signal.SIGTERM if child == sleeper else signal.SIGKILL)
                os.waitpid(child, 0)
            break
        time.sleep(0.05)
    for name, codes in ends.items():
        (folder / f"{name}.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
