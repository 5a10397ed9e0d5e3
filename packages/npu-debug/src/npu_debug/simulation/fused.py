"""The fused operators of torch_npu (``torch.ops.npu.*``) on simulated devices.

A fused operator is a kernel of the device, so it has no CPU kernel to run. Packages offer theirs through the entry
point group `npu_debug.sim_kernels`: the entry point names a function without arguments that returns a dictionary from
the operator's name (``"npu_rms_norm"``, ``"npu_max.dim"``) to a function of CPU tensors with the operator's own
signature. Autograd, shapes for tracing and argument checks remain torch_npu's.
"""

import difflib
import inspect
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
            f"torch.ops.npu.{name} is a fused operator of the device, and no installed package offers a kernel for "
            f"simulated devices (entry point group '{GROUP}'). Register a function of CPU tensors with the same "
            f"signature: npu_debug.sim.register_kernel('{name}', function). Its schema: {_operator(name)._schema}"
        )

    return kernel


def register_kernel(name: str, function: Callable[..., Any]) -> None:
    """Run ``function`` where torch_npu calls the fused operator ``name`` on a simulated device.

    The derivative is torch_npu's and calls another operator (``npu_rms_norm_backward``), which needs a kernel too.

    Args:
        name: The operator without its namespace, with the overload if it has one: ``npu_rms_norm``, ``npu_max.dim``.
        function: Takes the operator's arguments, with CPU tensors over the same memory; returns CPU tensors. Arguments
            that equal the operator's default are left out, so its defaults must be the operator's.

    Raises:
        ValueError: torch_npu has no such operator, or the function cannot be called as it.
    """
    name = name.removeprefix("npu::")
    op = _operator(name)
    if op is None:
        near = difflib.get_close_matches(name, _names(), n=3)
        raise ValueError(
            f"torch_npu has no operator torch.ops.npu.{name}." + (f" Did you mean {' or '.join(near)}?" if near else "")
        )
    _check_signature(name, op, function)
    _registered[name] = function
    _library.impl(name, HostKernel(op, _streams, _checked(name, op, function)), "PrivateUse1", allow_override=True)


def _names() -> list[str]:
    """The names of torch_npu's operators."""
    names = torch._C._dispatch_get_all_op_names()
    return [name.removeprefix("npu::") for name in names if name.startswith("npu::")]


def _check_signature(name: str, op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    """That the function takes every call the operator can make, and with the same defaults."""
    if not callable(function):
        raise ValueError(f"The kernel of {name} is of type {type(function).__name__}; give a function.")
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C that does not tell
        return
    arguments = op._schema.arguments
    needed = [argument for argument in arguments if not argument.has_default_value()]
    for chosen in (needed, arguments):
        try:
            bound = parameters.bind(
                *(None for argument in chosen if not argument.kwarg_only),
                **{argument.name: None for argument in chosen if argument.kwarg_only},
            )
        except TypeError as error:
            raise ValueError(f"The kernel of {name} cannot be called as the operator: {error}. {op._schema}") from None
    for argument, parameter in zip(arguments, bound.signature.parameters.values(), strict=False):
        plain = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        given = plain and argument.has_default_value() and parameter.default is not parameter.empty
        if given and parameter.default != argument.default_value:
            raise ValueError(
                f"The kernel of {name} has {parameter.name}={parameter.default!r}, and the operator "
                f"{argument.name}={argument.default_value!r}. A call with the default leaves it out: make them equal."
            )


def _checked(name: str, op: torch._ops.OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose results must be as many and of the kinds that the operator returns."""
    kinds = [str(result.type) for result in op._schema.returns]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        results = result if len(kinds) > 1 and isinstance(result, (tuple, list)) else [result]
        fits = len(results) == len(kinds) and all(
            # One of several may be undefined, such as the gradient of an argument that was not given.
            kind != "Tensor" or isinstance(value, torch.Tensor) or (value is None and len(kinds) > 1)
            for kind, value in zip(kinds, results, strict=True)
        )
        if kinds and not fits:
            given = ", ".join(type(value).__name__ for value in results)
            raise TypeError(f"The kernel of {name} returned ({given}); the operator returns ({', '.join(kinds)}).")
        return result

    return kernel


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
