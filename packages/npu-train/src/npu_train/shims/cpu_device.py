"""Let torchtitan run on a machine without an accelerator.

What it replaces: the two module attributes ``torchtitan.tools.utils.device_type`` and ``device_module``.
Why no seam serves: torchtitan decides on the device when that module is imported and falls back to ``"cuda"`` where
    torch knows no accelerator; no configuration reaches it, and other modules copy the two names on import.
Unnecessary once: torchtitan chooses the CPU itself (pytorch/torchtitan#1661). ``tests/test_cpu_device.py`` fails on the
    first version that does.
"""

import os
import resource
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

# Modules that are loaded along with torchtitan.tools.utils and copy neither of the two names.
_HARMLESS = ("torchtitan.tools", "torchtitan.observability")


class CpuDevice(ModuleType):
    """``torch.cpu`` with the accelerator functions that torchtitan calls; memory is the host memory of this process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        # torch.cpu answers "cpu", which torch.distributed.barrier(device_ids=[...]) refuses.
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name="CPU", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Resident memory of this process in bytes: now as ``active``, the highest so far as ``reserved``."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": resident,
            "reserved_bytes.all.peak": max(peak, resident),
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """The kernel keeps one peak for the life of a process; it is not reset."""

    def empty_cache(self) -> None:
        """The host allocator keeps no cache that could be given back."""


def install() -> None:
    """Point torchtitan at the CPU.

    Raises:
        RuntimeError: a torchtitan module that copies the two names has been imported already.
    """
    utils = sys.modules.get("torchtitan.tools.utils")
    if utils is not None and isinstance(utils.device_module, CpuDevice):
        return
    too_early = sorted(
        name for name in sys.modules if name.startswith("torchtitan.") and not name.startswith(_HARMLESS)
    )
    if too_early:
        raise RuntimeError(
            f"torchtitan can be pointed at the CPU only before its modules are imported; {too_early[0]} already is. "
            "Call npu_train.device.select_device first."
        )
    import torchtitan.tools.utils as utils

    utils.device_type = "cpu"
    utils.device_module = CpuDevice("npu_train_cpu_device")
