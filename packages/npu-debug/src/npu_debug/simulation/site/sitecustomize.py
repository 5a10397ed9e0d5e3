"""Found first on PYTHONPATH by every Python that `npu-debug sim` starts, directly or through torchrun."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _run_the_other_sitecustomize() -> None:
    """The environment's own file of this name, which this one hides."""
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_other_sitecustomize()
if os.environ.get("NPU_SIM_ACTIVE") == "1":
    if importlib.util.find_spec("npu_debug") is not None:
        from npu_debug.simulation import hook

        hook.install()
    elif importlib.util.find_spec("torch_npu") is not None:
        print(
            f"npu-debug sim: {sys.executable} has torch_npu but not npu-debug, so its devices are not simulated. "
            "Install npu-debug there.",
            file=sys.stderr,
        )
