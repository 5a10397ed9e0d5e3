"""When a recipe validates. What the trainer does with a NaN needs whole runs: tests-integration/test_nonfinite.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_train.recipe_configs import quickstart
from npu_train.trainer import LastStepValidator


def validator(freq: int) -> LastStepValidator:
    names = "parallelism dp_world_size dp_rank tokenizer parallel_dims loss_fn validation_context metrics_processor"
    names += " seq_len local_batch_size"
    unused: dict[str, Any] = dict.fromkeys(names.split())
    return LastStepValidator(LastStepValidator.Config(freq=freq, steps=1), **unused)


@pytest.mark.parametrize(
    ("freq", "last_step", "expected"),
    [(200, 30, [1, 30]), (10, 30, [1, 10, 20, 30]), (20, 30, [1, 20, 30]), (10, 0, [1, 10, 20, 30]), (200, 0, [1])],
)
def test_the_last_step_is_validated(freq: int, last_step: int, expected: list[int]) -> None:
    tested = validator(freq)
    tested.last_step = last_step
    assert [step for step in range(1, 31) if tested.should_validate(step)] == expected


def test_the_quickstart_validates_its_last_step() -> None:
    assert isinstance(quickstart().validator, LastStepValidator.Config)


def test_a_run_ends_with_a_validation_whatever_its_number_of_steps(tmp_path: Path) -> None:
    # By its configuration, not as a recipe: no text is sampled then.
    command = "run --module npu_train.recipe_configs --config quickstart --device cpu --dump-folder run "
    command += "--training.seq-len 32 --training.local-batch-size 1 --training.global-batch-size 1 "
    command += "--validator.steps 1 --training.steps 2 --checkpoint.no-enable"
    done = subprocess.run(
        [sys.executable, "-m", "npu_train", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "validation"] == [1, 2]
