"""The machinery of simulated Ascend devices; nothing here is active until `npu_debug.sim` or `hook.install` is asked for."""
