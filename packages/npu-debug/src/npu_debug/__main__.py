"""`python -m npu_debug` is the command `npu-debug`."""

import sys

from npu_debug.cli import main

if __name__ == "__main__":
    sys.exit(main())
