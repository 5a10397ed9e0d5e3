"""What a run prints: one line a step group on one process, warnings, and nothing else unless asked."""

import logging
import sys
import warnings

# Upstream warnings that are wrong where torchtitan knows no peak FLOP/s, or about nothing that the user asked for.
_NOT_FOR_USERS = (
    "Peak flops undefined for",
    "Error running lspci",
    "initial_load_model_only=True has no effect",
    "Pipeline Parallel loss is not visible",
    "will be overridden to",
    "model.safetensors.index.json not found at hf_assets_path",
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
        # Said once, in our words, where it matters (configs.py).
        warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
        # Parameters do not depend on DTensor's random numbers here (configs.py), so their absence is no news.
        warnings.filterwarnings(
            "ignore", message="DTensor (manual_seed|random operators).* may not have complete support"
        )
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
