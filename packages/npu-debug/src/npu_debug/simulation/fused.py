"""The fused operators of torch_npu (``torch.ops.npu.*``) on simulated devices.

A fused operator is a kernel of the device, so it has no CPU kernel to run. Packages offer theirs through the entry
point group `npu_debug.sim_kernels`: the entry point names a function without arguments that returns a dictionary from
the operator's name (``"npu_rms_norm"``, ``"npu_max.dim"``) to a function of CPU tensors with the operator's own
signature. Autograd, shapes for tracing and argument checks remain torch_npu's.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import torch

from .kernels import HostKernel, Streams

GROUP = "npu_debug.sim_kernels"

# These describe memory and do not compute: torch_npu's own code serves them.
NATIVE = frozenset(
    """
    empty_with_format empty_with_swapped_memory get_npu_format get_storage_size npu_change_data_ptr set_op_timeout_ms
    unsafe_empty_with_format
    """.split()  # noqa: SIM905
)

_registered: dict[str, Callable[..., Any]] = {}
_library: torch.library.Library | None = None
_streams: Streams


def _cast(tensor: torch.Tensor, dtype: torch.dtype, *_: Any) -> torch.Tensor:
    return tensor.to(dtype)


def _cast_(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return tensor.copy_(source)


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    # Simulated memory has one layout; torch_npu's private ones are not modelled.
    return tensor.clone()


def _non_finite_check(scaled_grads: list[torch.Tensor]) -> bool:
    return not all(bool(torch.isfinite(grad).all()) for grad in scaled_grads)


# What torch_npu calls by itself while it serves plain PyTorch.
BUILT_IN: dict[str, Callable[..., Any]] = {
    "npu_dtype_cast": _cast,
    "_npu_dtype_cast": _cast,
    "npu_dtype_cast_": _cast_,
    "npu_dtype_cast_backward": _cast,
    "_npu_dtype_cast_backward": _cast,
    "npu_format_cast": _same,
    "_npu_format_cast": _same,
    "_npu_format_cast.aclnn": _same,
    "_amp_foreach_non_finite_check": _non_finite_check,
}


def _operator(name: str) -> torch._ops.OpOverload | None:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.npu, base, None), overload or "default", None)


def _missing(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"torch.ops.npu.{name} is a fused operator of the device, and no kernel for simulated devices is "
            f"registered. Install a package that offers one (npu-ops, by its entry point in '{GROUP}'), or register a "
            f"function of CPU tensors with the same signature: npu_debug.sim.register_kernel('{name}', function)."
        )

    return kernel


def register_kernel(name: str, function: Callable[..., Any]) -> None:
    """Run ``function`` where torch_npu calls the fused operator ``name`` on a simulated device.

    Args:
        name: The operator without its namespace, with the overload if it has one: ``npu_rms_norm``, ``npu_max.dim``.
        function: Takes the operator's arguments, with CPU tensors over the same memory; returns CPU tensors.

    Raises:
        ValueError: torch_npu has no such operator.
    """
    op = _operator(name)
    if op is None:
        raise ValueError(f"torch_npu has no operator torch.ops.npu.{name}.")
    _registered[name] = function
    _library.impl(name, HostKernel(op, _streams, function), "PrivateUse1", allow_override=True)


def registered() -> list[str]:
    """The names of the fused operators that have a kernel."""
    return sorted(_registered)


def register(streams: Streams) -> None:
    """Register what packages offer; every other fused operator says what is missing when it is called."""
    global _library, _streams
    _library, _streams = torch.library.Library("npu", "IMPL"), streams
    offered = dict(BUILT_IN)
    for entry_point in entry_points(group=GROUP):
        offered.update(entry_point.load()())
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("npu::")
        if full == name or name in offered or name.partition(".")[0] in NATIVE:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(full, "PrivateUse1") and _operator(name) is not None:
            _library.impl(name, _missing(name), "PrivateUse1", allow_override=True)
    for name, function in offered.items():
        if _operator(name) is not None:
            register_kernel(name, function)
