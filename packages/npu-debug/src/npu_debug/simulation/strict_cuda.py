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
    "_lazy_init": "device='npu', or .npu() for .cuda()",
    "amp": "torch.amp with the device: torch.amp.autocast('npu'), torch.amp.GradScaler('npu')",
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


# These look at torch.cuda on behalf of their caller, who asked for "cuda" or left it the default.
_AMP = {
    "torch.amp.autocast_mode": ("torch.autocast('cuda')", "torch.autocast('npu')"),
    "torch.amp.grad_scaler": ("torch.amp.GradScaler('cuda'), its default,", "torch.amp.GradScaler('npu')"),
}


def _module(frame: types.FrameType | None) -> str:
    return frame.f_globals.get("__name__", "") if frame is not None else "torch"


def _is_program(frame: types.FrameType | None) -> bool:
    return _module(frame).partition(".")[0] not in _FRAMEWORKS


class _StrictModule(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            frame: types.FrameType | None = sys._getframe(1)
            while _module(frame).startswith(("importlib.", "_frozen_importlib")):  # from torch.cuda import ...
                frame = frame.f_back
            used, portable = f"torch.cuda.{name}", _PORTABLE.get(name)
            if name == "_lazy_init":  # torch asks for the device on behalf of a caller, near or far
                while frame is not None and not _is_program(frame):
                    frame = frame.f_back
            if _module(frame) in _AMP and frame.f_code.co_name == "__init__":
                used, portable = _AMP[_module(frame)]
                given = frame.f_locals.get("device_type", frame.f_locals.get("device"))
                frame = frame.f_back if given == "cuda" else None
            if _is_program(frame):
                portable = portable or f"torch.npu.{name}, or its counterpart in torch.accelerator"
                raise RuntimeError(
                    f"{frame.f_code.co_filename}:{frame.f_lineno}: {used} is used, and there is no CUDA device on an "
                    f"Ascend machine. Write {portable}."
                )
        return super().__getattribute__(name)


def install() -> None:
    """Watch torch.cuda in this process. torch must be loaded."""
    import torch

    torch.cuda.__class__ = _StrictModule
