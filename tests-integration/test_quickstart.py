"""The main job, as the README runs it."""

import json
import math
import re
import resource
from pathlib import Path

import pytest
from commands import run


@pytest.mark.timeout(1800)
def test_quickstart_learns_in_minutes(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("npu-train", "run", "quickstart", cwd=tmp_path, timeout=1800)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"quickstart took {seconds:.0f} s of processor time")
    assert done.returncode == 0, done.stdout
    folder = tmp_path / "outputs" / "quickstart"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "event" not in line}
    first, last = losses[min(losses)], losses[max(losses)]
    # A model that knows nothing gives each of the 2048 tokens the same chance.
    assert abs(first - math.log(2048)) < 0.2
    assert first - last >= 2.5, losses
    validation = [line["loss"] for line in lines if line.get("event") == "validation"]
    assert validation[0] - validation[-1] >= 2.0
    assert lines[-1]["event"] == "end"

    step_line = re.compile(
        r"^step +\d+/\d+  loss +[\d.]+  grad_norm +[\d.]+  tokens/s +[\d,]+  memory [\d.]+ GiB  mfu n/a  "
        r"remaining (\?|[\dhms ]+)$",
        re.M,
    )
    assert len(step_line.findall(done.stdout)) == len(losses)
    assert "sample of step" in done.stdout
    for command in ("--resume", "npu-debug logs outputs/quickstart --plot loss.svg", "--nproc 2", "npu-train sample"):
        assert command in done.stdout
    # It is to end within 4 minutes on 2 idle cores. Processor time, because the tests' machine is not idle.
    assert seconds < 360
