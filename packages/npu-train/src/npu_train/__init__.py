"""Train language models with torchtitan on Ascend NPUs, or on any CPU machine first."""

from importlib.metadata import version

__version__ = version("npu-train")
