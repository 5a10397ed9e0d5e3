"""The terminal: which log lines and warnings of torch and torchtitan reach it, and how durations are written."""

import logging
import sys
import warnings

# Upstream log lines that are wrong where torchtitan knows no peak FLOP/s, or about nothing that the user asked for.
_NOT_FOR_USERS = (
    "Peak flops undefined for",
    "Error running lspci",
    "initial_load_model_only=True has no effect",
    "Pipeline Parallel loss is not visible",
    "will be overridden to",
    "model.safetensors.index.json not found at hf_assets_path",
)
# Python warnings about calls between torch and torchtitan, which the user of neither can change.
_BETWEEN_LIBRARIES = (
    # Parameters do not depend on DTensor's random numbers here (configs.py).
    "DTensor .* may not have complete support on cpu",
    # Said once, in our words, where it matters (configs.py).
    "In CPU autocast, but the target dtype is not supported",
    "FSDP2-wrapped module .* returned a view tensor",
    "To get the last learning rate computed by the scheduler",
)


def set_up_logging(verbose: bool, rank: int) -> None:
    """Route torchtitan's log: everything with ``verbose``; otherwise warnings of rank 0 and errors of the others."""
    handler = logging.StreamHandler(sys.stdout if verbose else sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            "[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s" if verbose else "%(levelname)s: %(message)s"
        )
    )
    level = logging.INFO if verbose else logging.WARNING if rank == 0 else logging.ERROR
    handler.setLevel(level)
    if not verbose:
        handler.addFilter(lambda record: not any(text in record.getMessage() for text in _NOT_FOR_USERS))
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category)
        # The other ranks would only repeat what rank 0 says.
        for message in _BETWEEN_LIBRARIES if rank == 0 else ("",):
            warnings.filterwarnings("ignore", message=message)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def duration(seconds: float) -> str:
    """Seconds as ``"1h 02m"``, ``"3m 04s"`` or ``"5s"``."""
    seconds = max(0, round(seconds))
    if seconds >= 3600:
        return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
    if seconds >= 60:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds}s"


def say(text: str) -> None:
    print(text, flush=True)
