"""Which device a process trains on, decided before torchtitan is imported."""

import importlib.util
import os
from dataclasses import dataclass, field

from .errors import InputError

DEVICES = ("auto", "npu", "cuda", "cpu", "sim")


@dataclass(frozen=True)
class Device:
    """A chosen device.

    Attributes:
        type: ``"npu"``, ``"cuda"`` or ``"cpu"``, torch's own name of it.
        notes: Sentences for the user about anything that did not happen as they may have expected.
    """

    type: str
    notes: list[str] = field(default_factory=list)


def _load_torch_npu() -> str | None:
    """Import torch_npu; return why there is no NPU, or None where there is one."""
    import torch

    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install 'npu-train[npu]')"
    try:
        import torch_npu  # noqa: F401
    # A missing CANN library surfaces as OSError, ImportError or RuntimeError, depending on which one is missing.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"torch_npu is installed but does not load ({reason}); source CANN's set_env.sh first"
    if not torch.npu.is_available() or torch.npu.device_count() == 0:
        return "torch_npu loads but sees no device (npu-smi info lists them)"
    return None


def _load_simulated_npu() -> None:
    from npu_debug.errors import InputError as CannotSimulate

    try:
        import npu_debug.sim  # noqa: F401
    except CannotSimulate as error:
        raise InputError(f"--device sim: {error}") from None


def select_device(requested: str = "auto") -> Device:
    """Choose the device and point torchtitan at it.

    ``auto`` takes an NPU, else a CUDA GPU, else the CPU. Must run before any module of torchtitan is imported.

    Args:
        requested: ``"auto"``, ``"npu"``, ``"cuda"``, ``"cpu"``, or ``"sim"`` for simulated NPUs.

    Raises:
        InputError: the requested device is unknown or is not there.
    """
    if requested not in DEVICES:
        raise InputError(f"unknown device '{requested}' given to --device. Choose one of: {', '.join(DEVICES)}.")
    # torch_npu without CANN breaks a plain `import torch`; it is imported explicitly below instead, where the failure
    # can be explained.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch

    notes: list[str] = []
    if requested == "sim":
        _load_simulated_npu()
        return Device(
            "npu", ["the NPUs are simulated on this machine's CPU: speed and memory bandwidth mean nothing here."]
        )
    if requested in ("auto", "npu"):
        no_npu = _load_torch_npu()
        if no_npu is None:
            return Device("npu")
        if requested == "npu":
            raise InputError(f"--device npu: {no_npu}. Use --device cpu to run without an NPU.")
        if importlib.util.find_spec("torch_npu") is not None:
            notes.append(f"no NPU: {no_npu}.")
    if requested in ("auto", "cuda") and torch.cuda.is_available():
        return Device("cuda", notes)
    if requested == "cuda":
        raise InputError("--device cuda: torch sees no CUDA device. Use --device cpu to run without one.")

    from .shims import cpu_device

    cpu_device.install()
    return Device("cpu", notes)
