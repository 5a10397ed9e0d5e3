"""Find out why a training run is slow, wrong, hung or out of memory, from the files it leaves behind."""

from importlib.metadata import version

__version__ = version("npu-debug")
