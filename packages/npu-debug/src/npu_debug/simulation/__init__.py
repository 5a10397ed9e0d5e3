"""The machinery of simulated Ascend devices. Nothing of it is active until `npu_debug.sim` is imported."""
