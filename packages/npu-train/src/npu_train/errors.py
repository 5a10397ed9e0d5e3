"""The two ways a command ends badly, and how a person is told."""

import difflib
import re
import sys
from collections.abc import Sequence
from typing import TextIO

EXIT_DONE = 0
EXIT_PROBLEM = 1
EXIT_UNUSABLE_INPUT = 2


class InputError(Exception):
    """The input is unusable; nothing was started (exit code 2).

    Args:
        problems: One paragraph a problem: what is wrong, where, and how to put it right.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class RunFailed(Exception):
    """The run started and ended with a problem (exit code 1)."""


def report(program: str, error: InputError | RunFailed, stream: TextIO | None = None) -> int:
    """Print ``error`` for a person and return the exit code that goes with it."""
    stream = stream or sys.stderr
    if isinstance(error, RunFailed):
        print(f"{program}: {error}", file=stream, flush=True)
        return EXIT_PROBLEM
    if len(error.problems) == 1:
        print(f"{program}: {error.problems[0]}", file=stream, flush=True)
        return EXIT_UNUSABLE_INPUT
    print(f"{program}: {len(error.problems)} problems; nothing was started.", file=stream)
    for number, problem in enumerate(error.problems, 1):
        print(f"{number:>3}. {problem}", file=stream, flush=True)
    return EXIT_UNUSABLE_INPUT


def reason(error: BaseException) -> str:
    """Why something failed: what the operating system said, where it did, else the exception's first sentence."""
    chain, cause = [], error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    told = next((e.strerror for e in chain if isinstance(e, OSError) and e.strerror), None)
    if told is not None:
        return told
    words = " ".join(str(error).split())
    sentence = re.split(r"(?<=\w)\. ", words)[0].rstrip(".")
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__


def near(word: str, known: Sequence[str]) -> str:
    """The names in ``known`` that ``word`` may have been meant for, else all of them."""
    return ", ".join(difflib.get_close_matches(word, known, n=4, cutoff=0.4) or sorted(known))
