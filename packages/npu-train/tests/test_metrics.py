"""The line of a step group."""

from pathlib import Path

import pytest

from npu_train.events import EventLog
from npu_train.overrides.metrics import StepLines

MEASURED = {
    "loss_metrics/global_avg_loss": 5.0,
    "grad_norm": 0.5,
    "throughput(tps)": 100.0,
    "memory/max_reserved(GiB)": 1.0,
}


def remaining(capsys: pytest.CaptureFixture[str], folder: Path, steps: list[int]) -> list[str]:
    """What the lines of ``steps`` of a run of 400 steps say about the remaining time."""
    lines = StepLines(EventLog(folder), total_steps=400, world_size=1, show_mfu=False, echo=True)
    for step in steps:
        lines.log(MEASURED, step)
    lines.close()
    return [line.rpartition("remaining ")[2] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("steps", [[400], [399, 400], [201, 220, 400]])
def test_nothing_remains_after_the_last_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, steps: list[int]
) -> None:
    told = remaining(capsys, tmp_path, steps)
    assert told[-1] == "0s"
    # The first line has nothing to go by, unless it is the last.
    assert told[0] == ("0s" if steps == [400] else "?")


def test_the_remaining_time_is_that_of_the_steps_so_far(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000.0, 1010.0])
    monkeypatch.setattr("npu_train.overrides.metrics.time.perf_counter", lambda: next(clock))
    # 100 steps in 10 s, and 200 more to go.
    assert remaining(capsys, tmp_path, [100, 200]) == ["?", "20s"]
