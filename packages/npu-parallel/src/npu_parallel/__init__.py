"""Distributed training strategies over DeviceMesh, DTensor and FSDP2, for any training loop.

Nothing is imported here but the standard library: ``npu_parallel.layout`` works without torch.
"""

from importlib.metadata import version

__version__ = version("npu-parallel")

__all__ = ["__version__"]
