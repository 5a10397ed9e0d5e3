"""Features of torchtitan on the CPU: recomputation, accumulation, bfloat16, compile, validation, resuming."""

import math
from pathlib import Path

import pytest
from jobs import degrees, succeeded, train
from ranks import Job, RankServer


@pytest.fixture(scope="module")
def plain(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Six uninterrupted steps of one process."""
    return succeeded(train(ranks, tmp_path_factory.mktemp("plain"), steps=6))


def losses(job: Job, first: int = 1, last: int = 3) -> dict[int, float]:
    return {step: loss for step, loss in job.column("loss").items() if first <= step <= last}


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(ranks: RankServer, plain: Job, tmp_path: Path, kind: str) -> None:
    job = succeeded(train(ranks, tmp_path, recompute=kind, steps=6))
    assert losses(job, 1, 6) == losses(plain, 1, 6)


def test_gradient_accumulation(ranks: RankServer, plain: Job, tmp_path: Path) -> None:
    job = succeeded(train(ranks, tmp_path, "--training.global-batch-size", "8", batch=2, steps=6))
    assert losses(job, 1, 6) == pytest.approx(losses(plain, 1, 6), rel=2e-6)


def test_accumulation_under_fsdp(ranks: RankServer, plain: Job, tmp_path: Path) -> None:
    job = succeeded(train(ranks, tmp_path, "--training.global-batch-size", "8", world_size=2, batch=2, steps=6))
    assert losses(job, 1, 6) == pytest.approx(losses(plain, 1, 6), rel=2e-6)


def test_bfloat16(ranks: RankServer, tmp_path: Path) -> None:
    # Small: a CPU without bfloat16 instructions takes many times as long as in float32.
    one, half = ({"world_size": 2, "batch": 1, "steps": 2}, ["--training.mixed-precision-param", "bfloat16"])
    full = losses(succeeded(train(ranks, tmp_path / "float32", **one)))
    job = losses(succeeded(train(ranks, tmp_path / "bfloat16", *half, **one)))
    # bfloat16 keeps 8 bits: the losses agree to about its rounding, and they are not the float32 ones.
    assert job == pytest.approx(full, rel=4e-3)
    assert job != full


def test_compile(ranks: RankServer, plain: Job, tmp_path: Path) -> None:
    job = succeeded(train(ranks, tmp_path, "--compile.enable", steps=6))
    assert losses(job, 1, 6) == pytest.approx(losses(plain, 1, 6), rel=1e-5)


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


CHECKPOINTS = ["--checkpoint.enable", "--checkpoint.interval", "3", "--checkpoint.no-last-save-model-only"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 8, []), (1, 8, [])),
        ((2, 4, []), (1, 8, [])),
        ((1, 8, []), (4, 4, degrees(tensor_parallel=2))),
        ((2, 4, []), (2, 8, degrees(pipeline_parallel=2))),
    ],
    ids=["same", "fewer", "more", "other-layout"],
)
def test_a_resumed_run_goes_on_as_if_uninterrupted(
    ranks: RankServer, plain: Job, tmp_path: Path, before: tuple[int, int, list[str]], after: tuple[int, int, list[str]]
) -> None:
    # The learning-rate schedule is that of six steps in both halves: the first half stops where a job would be cut off.
    for world_size, batch, options in (before, after):
        half = ["--checkpoint.load-step", "3"] if (tmp_path / "checkpoint").exists() else []
        job = train(ranks, tmp_path, *options, *CHECKPOINTS, *half, world_size=world_size, batch=batch, steps=6)
        succeeded(job)
    resumed_at = [event["step"] for event in job.events("resume")]
    assert resumed_at == [3]
    assert [line["step"] for line in job.lines if "event" not in line] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    assert losses(job, 1, 6) == pytest.approx(losses(plain, 1, 6), rel=2e-6)
    assert all(math.isfinite(value) for value in job.column("grad_norm").values())


def test_asynchronous_checkpoints_are_whole(ranks: RankServer, tmp_path: Path) -> None:
    job = succeeded(
        train(ranks, tmp_path, *CHECKPOINTS, "--checkpoint.async-mode", "async", world_size=2, batch=1, steps=6)
    )
    assert [event["step"] for event in job.events("checkpoint")] == [3, 6]
    again = succeeded(
        train(ranks, tmp_path, *CHECKPOINTS, "--checkpoint.load-step", "3", world_size=2, batch=1, steps=6)
    )
    first, second = [line["loss"] for line in again.lines if line.get("step") == 5 and "event" not in line]
    assert first == second
