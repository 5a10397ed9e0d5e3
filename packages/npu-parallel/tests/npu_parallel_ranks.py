"""Run a function on the ranks of a gloo group, each in its own process."""

import inspect
import multiprocessing
import os
import runpy
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0

# DTensor imports torch._dynamo on its first operation, which takes seconds.
_PRELOADED = ["pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]


def run_ranks(
    function: Callable[..., Any], ranks: int, store: Path, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Call ``function(rank, *args)`` on each rank; return the results in rank order.

    Processes are forked from a server that has imported torch once, and all of them have ended when this returns.

    Raises:
        AssertionError: A rank raised, died, or did not answer in ``timeout_s`` seconds.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # pytest gives test modules names that other processes cannot import.
    named = (inspect.getfile(function), function.__name__)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank_main, args=(*named, rank, ranks, str(store), pipes[rank][1], args), daemon=True)
        for rank in range(ranks)
    ]
    answers: dict[int, tuple[bool, Any]] = {}
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        deadline = time.monotonic() + timeout_s
        for rank, (receiver, _) in enumerate(pipes):
            if not receiver.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"rank {rank} of {ranks} did not answer in {timeout_s} s")
            try:
                answers[rank] = receiver.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} of {ranks} died") from None
            if not answers[rank][0]:
                raise AssertionError(f"rank {rank} of {ranks} raised:\n{answers[rank][1]}")
    finally:
        for process in processes:
            if process.pid is not None:
                process.join(timeout=5.0 if len(answers) == ranks else 0.1)
                if process.is_alive():
                    process.kill()
                    process.join()
        for receiver, _ in pipes:
            receiver.close()
    return [answers[rank][1] for rank in range(ranks)]


def _rank_main(file: str, name: str, rank: int, ranks: int, store: str, sender: Any, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        function = runpy.run_path(file)[name]
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        answer = (True, function(rank, *args))
        dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    sender.send(answer)
    sender.close()
