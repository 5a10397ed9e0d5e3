"""A run that meets NaN stops before its weights do, and says where it began."""

from pathlib import Path

import pytest
from jobs import degrees, train
from ranks import RankServer

CHECKPOINTS = ["--checkpoint.enable", "--checkpoint.interval", "2"]


@pytest.mark.parametrize(
    # A pipeline calls the module once a microbatch.
    ("world_size", "options", "good_calls"),
    [(1, [], 4), (2, [], 4), (2, degrees(pipeline_parallel=2), 8), (2, degrees(tensor_parallel=2), 4)],
    ids=["one", "fsdp2", "pp2", "tp2"],
)
def test_the_first_bad_module_is_named_and_the_good_checkpoint_kept(
    ranks: RankServer, tmp_path: Path, world_size: int, options: list[str], good_calls: int
) -> None:
    job = train(
        ranks,
        tmp_path,
        *CHECKPOINTS,
        *options,
        "--override.imports",
        f'faults.nan_after_some_calls={{"good_calls": {good_calls}}}',
        world_size=world_size,
        batch=2,
        steps=9,
    )
    assert set(job.codes) == {1}, job.output
    (event,) = job.events("nonfinite")
    step = event["step"]
    assert 3 <= step <= 6
    assert f"stopped at step {step}: the loss or a gradient is not finite" in job.output
    assert "is the output of layers.2.feed_forward (FaultyFeedForward)" in job.output
    last = (step - 1) // 2 * 2
    assert f"The last good checkpoint is {tmp_path}/checkpoint/step-{last}" in job.output
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        f"step-{saved}" for saved in range(2, last + 1, 2)
    ]
    assert "Traceback" not in job.output


def test_divergence_from_a_huge_learning_rate(ranks: RankServer, tmp_path: Path) -> None:
    job = train(ranks, tmp_path, "--optimizer.param-groups.0.optimizer-kwargs.lr", "1e30", batch=2, steps=9)
    assert job.codes == [1]
    assert "is not finite" in job.output
    assert "There is no checkpoint of this run yet" in job.output


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_infinite_gradient_is_not_applied(ranks: RankServer, tmp_path: Path, world_size: int) -> None:
    """With two ranks only one of them holds the infinite element; both must stop."""
    fault = ["--override.imports", "faults.infinite_gradient"]
    job = train(ranks, tmp_path, *fault, world_size=world_size, batch=2, steps=9)
    assert set(job.codes) == {1}
    assert job.output.count("stopped at step 1") == 1
    assert "is not finite" in job.output
    assert "layers.1.feed_forward.w2.weight" in job.output
