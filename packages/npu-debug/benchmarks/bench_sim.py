"""What simulated devices cost: a small kernel against the CPU's, a training step against the CPU run, and the start.

    .venvs/sim/bin/python packages/npu-debug/benchmarks/bench_sim.py [--steps 20]

Needs an environment with torch_npu (make sync-sim). The kernels are timed by turns in one process. The training step is
npu-train's quickstart recipe, once on the CPU and once on a simulated device, started together and run by turns. The
start is what `import npu_debug.sim` takes beyond the imports of torch and torch_npu, with the libraries built already.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARS = {"overhead of a small kernel (us)": 100, "quickstart step, share of the CPU's": 2.5, "start-up (s)": 3}
TURN_S = 0.5

START = """
import time
import torch
from npu_debug.simulation import hook
spent = 0.0
def timed(function):
    def run():
        global spent
        begin = time.perf_counter()
        function()
        spent += time.perf_counter() - begin
    return run
begin = time.perf_counter()
hook._before, hook._after = timed(hook._before), timed(hook._after)
hook.install()
spent += time.perf_counter() - begin
import torch_npu
print(spent)
"""


def kernel_overhead() -> float:
    """Median microseconds that a small addition takes longer on a simulated device than on the CPU."""
    import torch

    import npu_debug.sim  # noqa: F401

    cpu = torch.ones(16)
    npu = cpu.npu()

    def us(tensor: torch.Tensor, calls: int = 2000) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            tensor + tensor
        return (time.perf_counter() - begin) / calls * 1e6

    us(cpu), us(npu)
    return statistics.median(us(npu) - us(cpu) for _ in range(15))


def start_up() -> float:
    """Seconds; the median of three processes."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    line = [sys.executable, "-W", "ignore", "-c", START]
    runs = [subprocess.run(line, env=environment, capture_output=True, text=True, check=True) for _ in range(3)]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs)


def _step_times(folder: Path) -> list[float]:
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["step_s"] for line in lines if line.get("step_s") and line["step"] > 3]


def quickstart_ratio(steps: int) -> float:
    """Time per step of the quickstart on a simulated device, as a share of the CPU's, by turns on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for device in ("cpu", "sim"):
            line = [sys.executable, "-m", "npu_train", "run", "quickstart", "--device", device]
            line += ["--dump-folder", f"{folder}/{device}", "--training.steps", str(10 * steps)]
            line += ["--metrics.log-freq", "1", "--validator.no-enable"]
            sides[device] = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        used = dict.fromkeys(sides, 0.0)
        first: dict[str, tuple[int, float]] = {}
        done: dict[str, tuple[int, float]] = {}
        try:
            for process in sides.values():
                process.send_signal(signal.SIGSTOP)
            while len(done) < len(sides):
                for device, process in sides.items():
                    if process.poll() is not None:
                        sys.exit(f"the quickstart on {device} ended with exit code {process.returncode}")
                    begin = time.perf_counter()
                    process.send_signal(signal.SIGCONT)
                    time.sleep(TURN_S)
                    process.send_signal(signal.SIGSTOP)
                    used[device] += time.perf_counter() - begin
                    logged = len(_step_times(Path(folder) / device))
                    if logged and device not in first:
                        first[device] = (logged, used[device])
                    if device in first and logged >= first[device][0] + steps and device not in done:
                        done[device] = (logged, used[device])
        finally:
            for process in sides.values():
                process.kill()
                process.wait()
        per_step = {d: (done[d][1] - first[d][1]) / (done[d][0] - first[d][0]) for d in sides}
    print(f"  quickstart: {per_step['cpu']:.2f} s a step on the CPU, {per_step['sim']:.2f} s on a simulated device")
    return per_step["sim"] / per_step["cpu"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if importlib.util.find_spec("torch_npu") is None:
        print("bench_sim needs torch_npu: make sync-sim, then run it with .venvs/sim/bin/python")
        return 2
    # Without CANN a plain `import torch` fails at torch_npu.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    measured = {
        "start-up (s)": start_up(),
        "quickstart step, share of the CPU's": quickstart_ratio(options.steps),
        "overhead of a small kernel (us)": kernel_overhead(),
    }
    for name, value in measured.items():
        print(f"{name}: {value:.2f} (wanted: at most {BARS[name]})")
    return 0 if all(value <= BARS[name] for name, value in measured.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
