"""Make the import of torch_npu in this process bring simulated devices.

Before it the stand-in libraries are loaded, after it the kernels are registered. Nothing of torch_npu is changed; its
libraries find the stand-ins by name because they are loaded already.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from .build import STAND_INS, SimError, library_folder

# Read by this package; set by `npu-debug sim` for the processes it starts.
ACTIVE = "NPU_SIM_ACTIVE"
_state: dict[str, object] = {}


def _before() -> None:
    # A program may import torch_npu first. Torch's own loading of it would then find it half imported; torch_npu
    # switches that off too, and puts the variable back afterwards.
    chosen = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch

    if chosen is None:
        del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    else:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = chosen
    if "TASK_QUEUE_ENABLE" in os.environ and os.environ["TASK_QUEUE_ENABLE"] != "0":
        print(
            "npu-debug sim: TASK_QUEUE_ENABLE=0 is used: simulated kernels run at once, not from a queue.",
            file=sys.stderr,
        )
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    folder = library_folder()
    cann = folder / "cann"
    os.environ["ASCEND_HOME_PATH"], os.environ["ASCEND_OPP_PATH"] = str(cann), str(cann / "opp")
    ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"), mode=ctypes.RTLD_GLOBAL)
    try:
        ctypes.CDLL(str(folder / "libkeys.so")).clear_keys()
        for name in STAND_INS:
            _state[name] = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SimError(
            f"The simulator's libraries in {folder} are damaged: {error}. Delete that folder: they are then built anew."
        ) from error


def _after() -> None:
    import torch

    from . import fused, kernels

    # Plain formats and complex numbers need it; see the guide.
    torch.npu.set_compile_mode(jit_compile=False)
    streams = kernels.Streams(_state["libascendcl.so"])
    _state["aten"] = kernels.register(streams)
    fused.register(streams)
    if os.environ.get("NPU_SIM_STRICT_CUDA") == "1":
        from . import strict_cuda

        strict_cuda.install()


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _before()
        with warnings.catch_warnings():
            # Its sources hold invalid escape sequences, which the first compilation warns about.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.inner.exec_module(module)
        _after()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def active() -> bool:
    """Whether torch_npu of this process runs, or will run, on simulated devices."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """From now on the import of torch_npu brings simulated devices.

    Raises:
        SimError: torch_npu is loaded already, on real devices.
    """
    if active():
        return
    if "torch_npu" in sys.modules:
        raise SimError(
            "torch_npu is loaded already, so its devices cannot be simulated any more. Import npu_debug.sim before "
            "torch and torch_npu, or start the program with npu-debug sim."
        )
    sys.meta_path.insert(0, _Finder())
