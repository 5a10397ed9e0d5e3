"""Features of torchtitan on the CPU: recomputation, accumulation, bfloat16, compile, validation, resuming."""

import math
from functools import partial
from pathlib import Path

import jobs
import pytest
from jobs import degrees, succeeded
from ranks import Job, RankServer

# Rows of a step, and the last step; every job sees the same rows, of 64 tokens. Resuming is after step 2.
ROWS, STEPS, HALF = 4, 4, 2
train = partial(jobs.train, seq_len=64)


@pytest.fixture(scope="module")
def plain(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Uninterrupted steps of one process."""
    return succeeded(train(ranks, tmp_path_factory.mktemp("plain"), batch=ROWS, steps=STEPS))


def losses(job: Job) -> dict[int, float]:
    return job.column("loss")


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(ranks: RankServer, plain: Job, tmp_path: Path, kind: str) -> None:
    job = succeeded(train(ranks, tmp_path, recompute=kind, batch=ROWS, steps=STEPS))
    assert losses(job) == losses(plain)


def test_gradient_accumulation(ranks: RankServer, plain: Job, tmp_path: Path) -> None:
    job = succeeded(train(ranks, tmp_path, "--training.global-batch-size", str(ROWS), batch=1, steps=STEPS))
    assert losses(job) == pytest.approx(losses(plain), rel=2e-6)


def test_accumulation_under_fsdp(ranks: RankServer, plain: Job, tmp_path: Path) -> None:
    job = succeeded(
        train(ranks, tmp_path, "--training.global-batch-size", str(ROWS), world_size=2, batch=1, steps=STEPS)
    )
    assert losses(job) == pytest.approx(losses(plain), rel=2e-6)


def test_bfloat16(ranks: RankServer, tmp_path: Path) -> None:
    # Small: a CPU without bfloat16 instructions takes many times as long as in float32.
    one, half = ({"world_size": 2, "batch": 1, "steps": 2}, ["--training.mixed-precision-param", "bfloat16"])
    full = losses(succeeded(train(ranks, tmp_path / "float32", **one)))
    job = losses(succeeded(train(ranks, tmp_path / "bfloat16", *half, **one)))
    # bfloat16 keeps 8 bits: the losses agree to about its rounding, and they are not the float32 ones.
    assert job == pytest.approx(full, rel=4e-3)
    assert job != full


def test_compile(ranks: RankServer, plain: Job, tmp_path: Path) -> None:
    job = succeeded(train(ranks, tmp_path, "--compile.enable", batch=ROWS, steps=STEPS))
    assert losses(job) == pytest.approx(losses(plain), rel=1e-5)


def test_validation_is_the_same_on_two_processes(ranks: RankServer, tmp_path: Path) -> None:
    options = [
        "--validator.enable",
        "--validator.freq",
        "2",
        "--validator.steps",
        "1",
        "--validator.dataloader.dataset",
        "c4_test",
    ]
    one = succeeded(train(ranks, tmp_path / "one", *options, batch=4, steps=2))
    two = succeeded(train(ranks, tmp_path / "two", *options, world_size=2, batch=2, steps=2))
    values = [[(event["step"], event["loss"]) for event in job.events("validation")] for job in (one, two)]
    assert [step for step, _ in values[0]] == [1, 2]
    assert [loss for _, loss in values[0]] == pytest.approx([loss for _, loss in values[1]], rel=2e-6)
    # Held-out text is other text: its loss is near the training loss, not equal to it.
    assert values[0][0][1] == pytest.approx(one.column("loss")[1], rel=0.05)
    assert values[0][0][1] != one.column("loss")[1]


CHECKPOINTS = ["--checkpoint.enable", "--checkpoint.interval", str(HALF), "--checkpoint.no-last-save-model-only"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 4, []), (1, 4, [])),
        ((2, 2, []), (1, 4, [])),
        ((1, 4, []), (4, 2, degrees(tensor_parallel=2))),
        ((2, 2, []), (2, 4, degrees(pipeline_parallel=2))),
    ],
    ids=["same", "fewer", "more", "other-layout"],
)
def test_a_resumed_run_goes_on_as_if_uninterrupted(
    ranks: RankServer, plain: Job, tmp_path: Path, before: tuple[int, int, list[str]], after: tuple[int, int, list[str]]
) -> None:
    # The first job runs on to the end, so that both follow the same schedule; the second goes back to the middle.
    for world_size, batch, options in (before, after):
        half = ["--checkpoint.load-step", str(HALF)] if (tmp_path / "checkpoint").exists() else []
        job = train(ranks, tmp_path, *options, *CHECKPOINTS, *half, world_size=world_size, batch=batch, steps=STEPS)
        succeeded(job)
    resumed_at = [event["step"] for event in job.events("resume")]
    assert resumed_at == [HALF]
    assert [line["step"] for line in job.lines if "event" not in line] == [1, 2, 3, 4, 3, 4]
    assert losses(job) == pytest.approx(losses(plain), rel=2e-6)
    assert all(math.isfinite(value) for value in job.column("grad_norm").values())


def test_asynchronous_checkpoints_are_whole(ranks: RankServer, tmp_path: Path) -> None:
    job = succeeded(
        train(ranks, tmp_path, *CHECKPOINTS, "--checkpoint.async-mode", "async", world_size=2, batch=1, steps=STEPS)
    )
    assert [event["step"] for event in job.events("checkpoint")] == [HALF, STEPS]
    again = succeeded(
        train(ranks, tmp_path, *CHECKPOINTS, "--checkpoint.load-step", str(HALF), world_size=2, batch=1, steps=STEPS)
    )
    first, second = [line["loss"] for line in again.lines if line.get("step") == STEPS and "event" not in line]
    assert first == second
