"""A rank as a fork of this process, which has imported everything already."""

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
