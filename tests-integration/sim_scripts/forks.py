"""Ranks as forks of this process, which has imported everything already."""

import os
import sys
import traceback
from collections.abc import Callable


def fork(run: Callable[[], None]) -> int:
    """Run the function in a new process; its id. The exit code is 1 where it raises, with the traceback printed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return child


def go_on_as_ranks(world: int) -> int:
    """Returns in as many new processes, in each with its rank; this one ends when they have."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            return rank
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(f"the ranks ended with {codes}" if any(codes) else 0)
