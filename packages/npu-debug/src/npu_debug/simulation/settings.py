"""What can be set about simulated devices: environment variables, so that every process of a job has them."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from npu_debug.errors import InputError

DEFAULT_SOC = "Ascend910B1"
# As torch_npu recognises them.
SOCS = re.compile(r"Ascend(910B[1-4](-1)?|910B2C|910_93\d\d|950\w*)")
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LARGEST = 2**46


@dataclass(frozen=True)
class Settings:
    """Simulated devices of a process.

    Attributes:
        soc: Name that the devices give themselves, such as ``Ascend910B1``.
        devices: Number of devices, 1 to 64.
        memory: Bytes of each device; an allocation beyond it fails as on the device.
        trace: File that every device call is appended to as a line of JSON, or "".
        strict_cuda: Whether any use of ``torch.cuda`` by the program raises.
    """

    soc: str = DEFAULT_SOC
    devices: int = 8
    memory: int = 64 * 2**30
    trace: str = ""
    strict_cuda: bool = False

    def environment(self) -> dict[str, str]:
        """The variables that bring simulated devices to a process and its children."""
        return {"NPU_SIM_ACTIVE": "1", **self.variables()}

    def variables(self) -> dict[str, str]:
        """These settings as environment variables."""
        return {
            "NPU_SIM_SOC": self.soc,
            "NPU_SIM_DEVICES": str(self.devices),
            "NPU_SIM_MEMORY": str(self.memory),
            "NPU_SIM_TRACE": self.trace,
            "NPU_SIM_STRICT_CUDA": "1" if self.strict_cuda else "",
        }


def read(values: Mapping[str, str | None]) -> Settings:
    """Check what a user gave.

    Args:
        values: Options: ``soc``, ``devices``, ``memory`` (bytes, or with a unit: ``64GiB``), ``trace``,
            ``strict_cuda``. What is absent or None comes from its variable, ``NPU_SIM_SOC`` and so on, or has its
            default.

    Raises:
        InputError: with every value that cannot be used.
    """
    problems = []
    asked: dict[str, str] = {}

    def value(name: str, default: str) -> str:
        variable = f"NPU_SIM_{name.upper()}"
        given, label = values.get(name), f"--{name} "
        if given is None:
            given, label = os.environ.get(variable) or None, f"{variable}="
        asked[name] = f"{label}{given}"
        return default if given is None else given

    soc = value("soc", DEFAULT_SOC)
    if not SOCS.fullmatch(soc):
        problems.append(
            f"{asked['soc']} is not an Ascend SoC that torch_npu 2.14.0 knows. Examples: Ascend910B1 (A2), "
            "Ascend910_9391 (A3), Ascend950PR_9599."
        )
    devices = value("devices", "8")
    if not devices.isdecimal() or not 1 <= int(devices) <= 64:
        problems.append(f"{asked['devices']} is not a number of devices. Give 1 to 64.")
    memory = value("memory", "64GiB")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", memory)
    size = 0
    if match and match[2].upper() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if not 2**20 <= size <= _LARGEST:
        problems.append(
            f"{asked['memory']} is not a size from 1 MiB to 64 TiB. Write it like 64GiB, 512MiB or in bytes."
        )
    trace = value("trace", "")
    if trace:
        trace = os.path.abspath(os.path.expanduser(trace))
        try:
            with open(trace, "a"):
                pass
        except OSError as error:
            problems.append(
                f"{asked['trace']} cannot be written: {error.strerror}. Name a file in a folder that exists and is "
                "writable."
            )
    strict = os.environ.get("NPU_SIM_STRICT_CUDA", "")
    if strict not in ("", "0", "1"):
        problems.append(f"NPU_SIM_STRICT_CUDA={strict} is neither 1 nor 0.")
    strict_cuda = bool(values.get("strict_cuda")) or strict == "1"
    if problems:
        raise InputError("\n".join(problems))
    return Settings(soc, int(devices), size, trace, strict_cuda)
