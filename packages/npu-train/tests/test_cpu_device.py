"""The one shim: what it stands in for, and whether it is still needed."""

import os
import subprocess
import sys

import pytest
import torch
import torchtitan.components.metrics
import torchtitan.tools.utils

from npu_train.device import select_device
from npu_train.errors import InputError
from npu_train.shims import cpu_device


def python(code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture(scope="module")
def without_the_shim() -> subprocess.CompletedProcess:
    """A process that imports torchtitan, and the shim after it: importing takes seconds, so there is one."""
    return python(
        "import torchtitan.tools.utils as u; print(u.device_type)\nimport torchtitan.components.metrics\n"
        "from npu_train.shims import cpu_device\ncpu_device.install()"
    )


def test_torchtitan_still_falls_back_to_cuda(without_the_shim: subprocess.CompletedProcess) -> None:
    """Fails once torchtitan chooses the CPU by itself; the shim can then go."""
    assert without_the_shim.stdout.strip() == "cuda", without_the_shim.stderr


def test_too_late_is_refused(without_the_shim: subprocess.CompletedProcess) -> None:
    assert "can be pointed at the CPU only before its modules are imported" in without_the_shim.stderr


def test_torchtitan_sees_the_cpu() -> None:
    assert torchtitan.tools.utils.device_type == "cpu"
    monitor = torchtitan.components.metrics.DeviceMemoryMonitor("cpu")
    assert monitor.device_name == "CPU"
    assert monitor.device_capacity == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_is_that_of_the_process() -> None:
    device = torchtitan.tools.utils.device_module
    before = device.memory_stats()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    during = device.memory_stats()
    assert during["active_bytes.all.peak"] - before["active_bytes.all.peak"] > 60 << 20
    assert during["reserved_bytes.all.peak"] >= during["active_bytes.all.peak"]
    del block


def test_the_index_is_a_number() -> None:
    # torch.cpu.current_device() is "cpu", which torch.distributed.barrier(device_ids=[...]) refuses.
    assert torchtitan.tools.utils.device_module.current_device() == 0


def test_installing_twice_changes_nothing() -> None:
    before = torchtitan.tools.utils.device_module
    cpu_device.install()
    assert torchtitan.tools.utils.device_module is before


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "unknown device 'tpu'.*auto, npu, cuda, cpu"), ("npu", "--device npu: .*torch_npu"), ("cuda", "no CUDA")],
)
def test_a_device_that_is_not_there(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=message):
        select_device(device)
