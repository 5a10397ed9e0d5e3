"""Simulated Ascend devices in this process: import this module before torch_npu.

    import npu_debug.sim
    import torch
    torch.ones(3, device="npu")

The devices follow the environment variables that `npu-debug sim` sets (NPU_SIM_SOC, NPU_SIM_DEVICES, NPU_SIM_MEMORY,
NPU_SIM_TRACE, NPU_SIM_STRICT_CUDA). See the guide "Simulated devices" for what is simulated and what is not.
"""

import os

from npu_debug.simulation import hook, settings
from npu_debug.simulation.build import SimError, library_folder

# The C side reads plain numbers.
os.environ.update(settings.read({}).variables())
# Says what is missing, a compiler or torch_npu, better than the import below.
library_folder()
hook.install()
# Without CANN a plain `import torch` would fail at torch_npu before it is told about the stand-ins.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch_npu  # noqa: E402, F401

from npu_debug.simulation.fused import register_kernel, registered  # noqa: E402

__all__ = ["SimError", "register_kernel", "registered"]
