"""`npu-debug sim`, its settings, the pytest plugin and --strict-cuda."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_debug.cli import main
from npu_debug.errors import InputError
from npu_debug.simulation import command, settings

sim = pytest.mark.sim(in_process=False)


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [("64GiB", 64 * 2**30), ("512 MiB", 512 * 2**20), ("1.5gib", 3 * 2**29), ("2GB", 2 * 10**9), ("1048576", 2**20)],
)
def test_memory_sizes(given: str, bytes_: int) -> None:
    assert settings.read({"memory": given}).memory == bytes_


def test_all_problems_are_told_together(tmp_path: Path) -> None:
    given = {"soc": "Ascend910", "devices": "0", "memory": "64 GX", "trace": str(tmp_path / "no" / "file")}
    with pytest.raises(InputError) as raised:
        settings.read(given)
    assert [line.split()[0] for line in str(raised.value).splitlines()] == ["--soc", "--devices", "--memory", "--trace"]


@pytest.mark.parametrize("memory", ["100000GiB", "64 gb/s", "1e9GiB", "-1", "0", ""])
def test_memory_is_a_size(memory: str) -> None:
    with pytest.raises(InputError, match=r"--memory .* is not a size from 1 MiB to 64 TiB"):
        settings.read({"memory": memory})


@pytest.mark.parametrize("devices", ["-1", "65", "two", "1.5", "²", ""])
def test_devices_are_a_number(devices: str) -> None:
    with pytest.raises(InputError, match="--devices"):
        settings.read({"devices": devices})


def test_what_is_not_given_comes_from_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_DEVICES", "3")
    monkeypatch.setenv("NPU_SIM_MEMORY", "2GiB")
    monkeypatch.setenv("NPU_SIM_STRICT_CUDA", "1")
    chosen = settings.read({"memory": "1GiB", "soc": None, "strict_cuda": False})
    assert (chosen.devices, chosen.memory, chosen.strict_cuda) == (3, 2**30, True)
    monkeypatch.setenv("NPU_SIM_DEVICES", "99")
    with pytest.raises(InputError, match="NPU_SIM_DEVICES=99 is not a number of devices"):
        settings.read({})


PYTHON = sys.executable
TORCHRUN = [PYTHON, *command.LAUNCHER]


@pytest.mark.parametrize(
    ("given", "nproc", "started"),
    [
        (["train.py", "--lr", "1"], None, [PYTHON, "train.py", "--lr", "1"]),
        (["python", "train.py"], None, ["python", "train.py"]),
        (["torchrun", "train.py"], 4, [*TORCHRUN, "--standalone", "--nproc-per-node", "4", "train.py"]),
        (["python", "train.py", "a"], 2, [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py", "a"]),
        (["python", "-u", "train.py"], 2, [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py"]),
        (
            ["python3", "-m", "torch.distributed.run", "--nnodes=1", "train.py"],
            2,
            [*TORCHRUN, "--nproc-per-node", "2", "--nnodes=1", "train.py"],
        ),
        (["python", "-m", "my.job"], 2, [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--module", "my.job"]),
        (
            ["torchrun", "--master-port", "0", "train.py"],
            2,
            [*TORCHRUN, "--nproc-per-node", "2", "--master-port", "0", "train.py"],
        ),
    ],
)
def test_what_is_started(given: list[str], nproc: int | None, started: list[str]) -> None:
    assert command.command_line(given, nproc) == started


@pytest.mark.parametrize(
    ("given", "nproc", "says"),
    [
        ([], None, "no program"),
        (["bash", "run.sh"], 2, "bash is neither"),
        (["python", "-c", "1"], 2, "neither"),
        (["python", "-W", "error", "a.py"], 2, "PYTHONWARNINGS"),
        (["python", "-m", "torch.distributed.launch", "a.py"], 2, "Write torchrun"),
        (["torchrun", "--nproc-per-node=2", "a.py"], 2, "given twice"),
        (["torchrun", "--nnodes", "2", "a.py"], 2, "on one machine"),
        (["torchrun", "--nnodes=1:4", "a.py"], None, "on one machine"),
    ],
)
def test_what_cannot_be_started(given: list[str], nproc: int | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        command.command_line(given, nproc)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sim"], "no program"),
        (["sim", "--nproc", "0", "--", "a.py"], "--nproc 0"),
        (["sim", "--nproc", "9", "--", "a.py"], "Give --devices 9"),
        (["sim", "--nproc", "2", "--", "a.py"], "The script a.py does not exist"),
        (["sim", "--devices", "2", "python", "a.py", "--lr", "1"], "-- python a.py --lr 1"),
        (["sim", "--", "no-such-program"], "no-such-program was not found"),
        (["sim", "--memroy", "1GiB", "--", "a.py"], "--memory"),
        (["logs", "x", "--", "a.py"], "starts no program"),
    ],
)
def test_wrong_command_lines(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


def _sim(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(program)
    line = [sys.executable, "-m", "npu_debug", "sim", *options, "--", sys.executable, str(script)]
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(folder)})


@sim
def test_a_program_sees_the_devices_asked_for(tmp_path: Path) -> None:
    # The environment's own sitecustomize still runs.
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['MINE'] = 'ran'\n")
    program = """
import os, sys, torch
free, total = torch.npu.mem_get_info(1)
print(torch.npu.device_count(), torch.npu.get_device_name(1), total, os.environ["MINE"])
print(torch.accelerator.current_accelerator().type, torch.arange(4, device="npu").sum().item())
sys.exit(7)
"""
    options = ["--devices", "2", "--soc", "Ascend910_9391", "--memory", "3GiB"]
    done = _sim(tmp_path, program, *options)
    assert done.returncode == 7, done.stderr
    first, second = done.stdout.splitlines()[-2:]
    assert first == f"2 Ascend910_9391 {3 * 2**30} ran"
    assert second == "npu 6"


STRICT = """
import torch
torch.ones(1, device="npu")
for line in (
    "torch.cuda.device_count()",
    "from torch.cuda import is_available",
    "torch.ones(1).cuda()",
    "torch.ones(1, device='cuda')",
    "torch.amp.GradScaler()",
    "torch.amp.GradScaler('npu')",
    "torch.autocast('cuda')",
    "torch.autocast('cpu')",
    "torch.cuda.amp.GradScaler()",
    "torch.nn.Linear(1, 1).cuda()",
    "torch.cuda.nvtx.range_push('x')",
):
    try:
        exec(compile(line, "mine.py", "exec"))
        print("fine")
    except RuntimeError as error:
        print(error)
"""


@sim
def test_strict_cuda_names_the_place_in_the_program(tmp_path: Path) -> None:
    done = _sim(tmp_path, STRICT, "--strict-cuda")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith(("mine.py", "fine"))]
    there = "there is no CUDA device on an Ascend machine. Write "
    assert told == [
        f"mine.py:1: torch.cuda.device_count is used, and {there}torch.accelerator.device_count().",
        f"mine.py:1: torch.cuda.is_available is used, and {there}torch.accelerator.is_available().",
        *2 * [f"mine.py:1: torch.cuda._lazy_init is used, and {there}device='npu', or .npu() for .cuda()."],
        f"mine.py:1: torch.amp.GradScaler('cuda'), its default, is used, and {there}torch.amp.GradScaler('npu').",
        "fine",
        f"mine.py:1: torch.autocast('cuda') is used, and {there}torch.autocast('npu').",
        "fine",
        f"mine.py:1: torch.cuda.amp is used, and {there}torch.amp with the device: torch.amp.autocast('npu'), "
        "torch.amp.GradScaler('npu').",
        f"mine.py:1: torch.cuda._lazy_init is used, and {there}device='npu', or .npu() for .cuda().",
        f"mine.py:1: torch.cuda.nvtx is used, and {there}torch.npu.nvtx, or its counterpart in torch.accelerator.",
    ]


@sim
@pytest.mark.parametrize("first", ["import torch_npu", "import npu_debug.sim", "import torch"])
def test_any_import_may_be_the_first(tmp_path: Path, first: str) -> None:
    program = f"{first}\nimport os, torch, torch_npu\nprint(torch.ones(2, device='npu').sum().item())\n"
    program += "print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])\n"
    done = _sim(tmp_path, program)
    assert done.stdout.splitlines()[-2:] == ["2.0", "1"], done.stderr


@sim
def test_a_process_that_has_loaded_torch_npu_cannot_be_simulated_any_more(tmp_path: Path) -> None:
    program = """
import sys, types
sys.modules["torch_npu"] = types.ModuleType("torch_npu")
import npu_debug.simulation.hook as hook
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, hook._Finder)]
hook.install()
"""
    done = _sim(tmp_path, program)
    assert "torch_npu is loaded already" in done.stderr


@sim
def test_the_plugin_gives_marked_tests_simulated_devices(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import pytest\nimport torch_npu\n"
        "@pytest.mark.sim\n"
        "def test_marked():\n    import torch\n    assert torch.ones(2, device='npu').sum().item() == 2\n"
        "def test_fixture(sim):\n    assert sim.device_count() == 8\n"
    )
    line = [sys.executable, "-m", "pytest", "--sim", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@sim
def test_the_plugin_says_which_variable_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_fixture(sim):\n    pass\n")
    line = [sys.executable, "-m", "pytest", "--sim", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "NPU_SIM_DEVICES": "99"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1, done.stdout
    assert "NPU_SIM_DEVICES=99 is not a number of devices" in done.stdout
    assert "INTERNALERROR" not in done.stdout + done.stderr
