"""npu-train against torchtitan's own trainer: tokens/s and start-up, in pairs on this machine.

    python packages/npu-train/benchmarks/bench_trainer.py [--pairs 3] [--steps 30]

Both train torchtitan's llama3_debugmodel in one process on the CPU with the same attention, data and options
(minimal_trainer.py is the rival). The two sides of a pair are started together and run by turns, a quarter of a second
each, while the other is stopped: whatever else the machine does meets both alike. A side's time is that of its own
turns. The median over the pairs is reported.
"""

import argparse
import os
import re
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

OPTIONS = (
    "--module llama3 --config llama3_debugmodel --training.seq-len 256 --training.local-batch-size 8 "
    "--training.mixed-precision-param float32 --training.disable-cuda-graphs --debug.seed 0 --metrics.log-freq 1 "
    "--metrics.disable-color-printing --training.steps {steps} --dump-folder {folder} activation-checkpoint:none"
)
COMMANDS = {
    "npu-train": [sys.executable, "-m", "npu_train", "run", "--device", "cpu"],
    "torchtitan": [sys.executable, str(Path(__file__).with_name("minimal_trainer.py"))],
}
# torchtitan: "step:  1  loss: ...", after "Training starts at step 1"; npu-train: "step      1/30  loss ...".
STEP_LINE = r"\bstep:? +(\d+)(?:/\d+)? +loss"
TOKENS_A_STEP = 8 * 256
# The first steps fill caches and allocate.
WARM_UP_STEPS = 5
TURN_S = 0.25
BARS = {"tokens/s": (0.98, "at least"), "start-up": (1.15, "at most")}


@dataclass
class Side:
    """A running trainer.

    Attributes:
        process: Its process, leader of its own group.
        used_s: Seconds of its turns so far.
        at: Those seconds when it printed a step, by step.
        output: What it printed.
    """

    process: subprocess.Popen[str]
    used_s: float = 0.0
    at: dict[int, float] = field(default_factory=dict)
    output: str = ""

    @classmethod
    def start(cls, command: list[str], folder: str, steps: int) -> "Side":
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "PYTHONUNBUFFERED": "1",
        }
        options = OPTIONS.format(steps=steps, folder=folder).split()
        process = subprocess.Popen(
            [*command, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.killpg(process.pid, signal.SIGSTOP)
        os.set_blocking(process.stdout.fileno(), False)
        return cls(process)

    def turn(self) -> None:
        """Run for one turn, noting the steps that it prints."""
        begin = time.perf_counter()
        os.killpg(self.process.pid, signal.SIGCONT)
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while (left := begin + TURN_S - time.perf_counter()) > 0:
                if selector.select(left) and not self._read(self.used_s + time.perf_counter() - begin):
                    break
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGSTOP)
        self.used_s += time.perf_counter() - begin

    def _read(self, now: float) -> bool:
        data = self.process.stdout.read()
        if not data:
            return False
        self.output += data.decode()
        for step in re.findall(STEP_LINE, data.decode()):
            self.at.setdefault(int(step), now)
        return True


def pair(steps: int, swap: bool) -> dict[str, Side]:
    names = list(COMMANDS)[:: -1 if swap else 1]
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Side.start(COMMANDS[name], f"{folder}/{name}", steps) for name in names}
        try:
            while any(steps not in side.at for side in sides.values()):
                for name, side in sides.items():
                    side.turn()
                    if steps not in side.at and side.process.poll() is not None:
                        sys.exit(f"{name} ended with exit code {side.process.returncode}:\n{side.output[-3000:]}")
        finally:
            for side in sides.values():
                if side.process.poll() is None:
                    os.killpg(side.process.pid, signal.SIGKILL)
                side.process.wait()
                side.process.stdout.close()
    return sides


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in BARS}
    for number in range(options.pairs):
        sides = pair(options.steps, swap=number % 2 == 1)
        seconds = {name: side.at[options.steps] - side.at[WARM_UP_STEPS] for name, side in sides.items()}
        tokens_per_s = {name: (options.steps - WARM_UP_STEPS) * TOKENS_A_STEP / s for name, s in seconds.items()}
        ratios["tokens/s"].append(tokens_per_s["npu-train"] / tokens_per_s["torchtitan"])
        ratios["start-up"].append(sides["npu-train"].at[1] / sides["torchtitan"].at[1])
        told = (f"{n} {tokens_per_s[n]:,.0f} tokens/s, start-up {sides[n].at[1]:.1f} s" for n in COMMANDS)
        print(f"pair {number + 1}: {'; '.join(told)}", flush=True)
    good = True
    for name, values in ratios.items():
        bar, sense = BARS[name]
        ratio = statistics.median(values)
        good &= ratio >= bar if sense == "at least" else ratio <= bar
        print(f"{name}: {ratio:.3f} of torchtitan's own trainer (wanted: {sense} {bar}), median of {len(values)} pairs")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
