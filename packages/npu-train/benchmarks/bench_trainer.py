"""npu-train against torchtitan's own trainer: tokens/s and start-up, in pairs on this machine.

    python packages/npu-train/benchmarks/bench_trainer.py [--pairs 5] [--steps 30]

Both train torchtitan's llama3_debugmodel in one process on the CPU with the same attention, data and options
(minimal_trainer.py is the rival). The two sides of a pair run one after the other; the ratio of a pair cancels
what the machine does in the meantime, and the median of the ratios is reported.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

OPTIONS = (
    "--module llama3 --config llama3_debugmodel --training.seq-len 256 --training.local-batch-size 8 "
    "--training.mixed-precision-param float32 --training.disable-cuda-graphs --debug.seed 0 --metrics.log-freq 1 "
    "--metrics.disable-color-printing --training.steps {steps} --dump-folder {folder} activation-checkpoint:none"
)
TOKENS_A_STEP = 8 * 256
# The first steps fill caches and allocate.
WARM_UP_STEPS = 5
BARS = {"tokens/s": (0.98, "at least"), "start-up": (1.15, "at most")}


@dataclass(frozen=True)
class Measured:
    """One run: tokens per second after the warm-up, seconds from the start of the process to the end of step 1."""

    tokens_per_s: float
    start_up_s: float


def _from_times(times: dict[int, float], begin: float) -> Measured:
    last = max(times)
    seconds = times[last] - times[WARM_UP_STEPS]
    return Measured((last - WARM_UP_STEPS) * TOKENS_A_STEP / seconds, times[1] - begin)


def _run(command: list[str]) -> tuple[float, str]:
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    begin = time.time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return begin, done.stdout + done.stderr


def ours(steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        options = OPTIONS.format(steps=steps, folder=folder).split()
        begin, _ = _run([sys.executable, "-m", "npu_train", "run", "--device", "cpu", *options])
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return _from_times({line["step"]: line["time"] for line in lines if "event" not in line}, begin)


def rival(steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        options = OPTIONS.format(steps=steps, folder=folder).split()
        begin, output = _run([sys.executable, str(Path(__file__).with_name("minimal_trainer.py")), *options])
    found = re.findall(r"\[titan\] (\S+ \S+) - root - INFO - .*?step: +(\d+) ", output)
    times = {int(step): datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp() for at, step in found}
    return _from_times(times, begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        # Who goes first changes, so that neither always finds the warmer machine.
        order = (ours, rival) if number % 2 == 0 else (rival, ours)
        measured = {side.__name__: side(options.steps) for side in order}
        pairs.append((measured["ours"], measured["rival"]))
        mine, other = pairs[-1]
        print(
            f"pair {number + 1}: npu-train {mine.tokens_per_s:,.0f} tokens/s, start-up {mine.start_up_s:.1f} s; "
            f"torchtitan {other.tokens_per_s:,.0f} tokens/s, start-up {other.start_up_s:.1f} s",
            flush=True,
        )
    ratios = {
        "tokens/s": statistics.median(mine.tokens_per_s / other.tokens_per_s for mine, other in pairs),
        "start-up": statistics.median(mine.start_up_s / other.start_up_s for mine, other in pairs),
    }
    for name, ratio in ratios.items():
        bar, sense = BARS[name]
        print(f"{name}: {ratio:.3f} of torchtitan's own trainer (wanted: {sense} {bar}), median of {len(pairs)} pairs")
    good = ratios["tokens/s"] >= BARS["tokens/s"][0] and ratios["start-up"] <= BARS["start-up"][0]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
