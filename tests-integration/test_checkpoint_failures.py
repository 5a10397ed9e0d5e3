"""What becomes of a run whose checkpoint is damaged, cannot be written, or would hold weights that are not finite."""

from pathlib import Path

import pytest
from jobs import succeeded, train
from ranks import RankServer

CHECKPOINTS = ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.no-last-save-model-only"]
SHORT = {"batch": 1, "seq_len": 64}


def test_damage_that_leaves_the_size_is_told_in_a_sentence(ranks: RankServer, tmp_path: Path) -> None:
    succeeded(train(ranks, tmp_path, *CHECKPOINTS, world_size=2, steps=2, **SHORT))
    file = tmp_path / "checkpoint" / "step-2" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    job = train(ranks, tmp_path, *CHECKPOINTS, world_size=2, steps=3, resume=True, **SHORT)
    assert set(job.codes) == {1}, job.output
    assert job.output.count(f"the checkpoint {tmp_path}/checkpoint/step-2 does not load") == 1
    assert "the run then goes on from step 1" in job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_not_finite_are_not_saved(ranks: RankServer, tmp_path: Path, world_size: int) -> None:
    # A learning rate that Python holds, and float32 does not: the gradients are finite, the update is not.
    infinite = ["--optimizer.param-groups.0.optimizer-kwargs.lr", "1e42"]
    job = train(ranks, tmp_path, *CHECKPOINTS, *infinite, world_size=world_size, steps=1, **SHORT)
    assert set(job.codes) == {1}, job.output
    assert job.output.count("stopped at step 1: the parameter tok_embeddings.weight is not finite") == 1
    assert not list(tmp_path.glob("checkpoint/step-*/.metadata"))
    assert [event["step"] for event in job.events("nonfinite")] == [1]
    assert job.events("end") == []


def test_a_file_too_large(ranks: RankServer, tmp_path: Path) -> None:
    command = "npu-train run quickstart --device cpu --training.steps 1 --validator.no-enable"
    command += " --training.seq-len 64 --training.local-batch-size 1 --training.global-batch-size 1"
    done = ranks.command(*command.split(), cwd=tmp_path, largest_file=3_000_000)
    assert done.returncode == 1, done.stdout
    assert "the checkpoint outputs/quickstart/checkpoint/step-1 could not be written" in done.stdout
    assert "There is no whole checkpoint of this run yet" in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.glob("outputs/quickstart/checkpoint/step-1/.metadata"))
