"""What the training jobs of these tests have in common."""

from pathlib import Path
from typing import Any

from ranks import Job, RankServer

SEED = 7


def degrees(**parallelism: int) -> list[str]:
    """`degrees(tensor_parallel=2)` as torchtitan's options."""
    return [part for name, degree in parallelism.items() for part in (f"--parallelism.{name}_degree", str(degree))]


def from_seed(seed: Path) -> list[str]:
    """torchtitan's options that start from a seed checkpoint."""
    return ["--checkpoint.enable", "--checkpoint.load-only", "--checkpoint.initial-load-path", str(seed)]


def train(
    ranks: RankServer,
    folder: Path,
    *options: str,
    model: str = "llama3",
    world_size: int = 1,
    batch: int = 8,
    seq_len: int = 256,
    steps: int = 3,
    recompute: str = "none",
    **request: Any,
) -> Job:
    """Train torchtitan's debug model in float32 on the shipped corpus; every step is logged.

    Args:
        ranks: The server.
        folder: The run's folder.
        options: More of torchtitan's options.
        model: Family; its debug configuration is used.
        world_size: Processes.
        batch: Rows of a rank in one forward and backward.
        seq_len: Tokens of a row.
        steps: Last step.
        recompute: Kind of activation checkpointing.
        request: More fields of `RunRequest`.
    """
    common = {
        "training.seq-len": seq_len,
        "training.local-batch-size": batch,
        "training.mixed-precision-param": "float32",
        "training.steps": steps,
        "debug.seed": SEED,
        "metrics.log-freq": 1,
    }
    arguments = [part for name, value in common.items() for part in (f"--{name}", str(value))]
    return ranks.run(
        {
            "module": model,
            "config": f"{model}_debugmodel",
            "options": [*arguments, *options, f"activation-checkpoint:{recompute}"],
            "dump_folder": str(folder),
            **request,
        },
        world_size,
    )


def succeeded(job: Job) -> Job:
    assert set(job.codes) == {0}, job.output
    return job
