"""`--strict-cuda`: any use of torch.cuda by the program raises with the place in its code.

Such code runs on a machine with NVIDIA devices and fails, or quietly does nothing, on one with Ascend devices.
"""

import sys
import types
from typing import Any

# Frameworks look at torch.cuda to find out what there is; only the program's own use is a mistake.
_FRAMEWORKS = (
    "torch",
    "torch_npu",
    "torchtitan",
    "torchdata",
    "functorch",
    "npu_debug",
    "npu_ops",
    "npu_parallel",
    "npu_train",
)
_PORTABLE = {
    "amp": "torch.amp.autocast('npu'), or torch.amp.autocast(torch.accelerator.current_accelerator().type)",
    "current_device": "torch.accelerator.current_device_index()",
    "device_count": "torch.accelerator.device_count()",
    "empty_cache": "torch.accelerator.empty_cache()",
    "is_available": "torch.accelerator.is_available()",
    "manual_seed": "torch.manual_seed(seed)",
    "manual_seed_all": "torch.manual_seed(seed)",
    "max_memory_allocated": "torch.accelerator.max_memory_allocated()",
    "memory_allocated": "torch.accelerator.memory_allocated()",
    "set_device": "torch.accelerator.set_device_index(index)",
    "synchronize": "torch.accelerator.synchronize()",
    "Stream": "torch.Stream(device='npu')",
    "Event": "torch.Event(device='npu')",
    "current_stream": "torch.accelerator.current_stream()",
}


class _StrictModule(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            frame = sys._getframe(1)
            caller = frame.f_globals.get("__name__", "")
            if caller.partition(".")[0] not in _FRAMEWORKS:
                portable = _PORTABLE.get(name, f"torch.npu.{name}, or its counterpart in torch.accelerator")
                raise RuntimeError(
                    f"{frame.f_code.co_filename}:{frame.f_lineno}: torch.cuda.{name} is used, and there is no CUDA "
                    f"device on an Ascend machine. Write {portable}."
                )
        return super().__getattribute__(name)


def install() -> None:
    """Watch torch.cuda in this process. torch must be loaded."""
    import torch

    torch.cuda.__class__ = _StrictModule
