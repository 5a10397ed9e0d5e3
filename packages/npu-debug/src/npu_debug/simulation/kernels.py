"""The aten kernels of simulated devices: each runs the CPU's kernel over the same bytes.

"Device" memory is host memory, so a CPU tensor can alias an npu tensor, and the CPU kernel writes results in place.
Allocation, views and everything else that only describes tensors stay with torch_npu. What torch_npu computes with
device kernels of its own (operators and autograd formulas that are composite elsewhere) is decomposed as on every other
device, so that the numbers are those of the CPU bit for bit. An operator that torch_npu has no kernel for is left to
torch_npu's own fallback, with its warning.

torch_npu must be loaded on the stand-in libraries; `npu_debug.sim` does it.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Kernel = Callable[..., Any]
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_CPU = torch.device("cpu")

# These describe memory and do not compute: torch_npu's own code serves them.
NATIVE = frozenset(
    """
    _conj _has_compatible_shallow_copy_type _neg_view _pin_memory _reshape_alias _resize_output_ alias as_strided detach
    empty empty_like empty_permuted empty_strided expand is_pinned is_set_to new_empty new_empty_strided permute
    record_stream resize_ resize_as_ select set_ slice split squeeze storage_offset t transpose unfold unsqueeze view
    view_as_complex view_as_real
    """.split()  # noqa: SIM905
)
# Of torch_npu's kernels for composite operators, those that need no device.
NATIVE_COMPOSITE = frozenset({"contiguous", "flatten_dense_tensors"})
# Indices may be on the host beside a tensor of a device.
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
# Here any tensor on the host is a legal argument beside tensors of a device.
MIXED_DEVICES = INDEXING | frozenset(
    """
    _ctc_loss _pack_padded_sequence _unsafe_masked_index _unsafe_masked_index_put_accumulate is_same_size
    """.split()  # noqa: SIM905
)
# The CPU's attention kernels, which `scaled_dot_product_attention` below uses.
CPU_ATTENTION = frozenset(
    {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
)


class Streams:
    """What the C side knows of work that is still queued.

    Attributes:
        pending: Number of queued or running tasks of this process: the library's own counter.
        forked: Whether this process was forked from one that used the devices.
    """

    forked = False

    def __init__(self, library: ctypes.CDLL) -> None:
        self.pending = ctypes.c_int32.in_dll(library, "sim_pending_tasks")
        self._wait = library.sim_stream_wait
        self._wait.argtypes, self._wait.restype = [ctypes.c_void_p], ctypes.c_int
        self._message = library.aclGetRecentErrMsg
        self._message.restype = ctypes.c_char_p
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.forked = self.forked or torch.npu.is_initialized()

    def wait(self, device: torch.device) -> None:
        """Wait until the current stream of ``device`` is idle: the kernel about to run is the next thing on it.

        Raises:
            RuntimeError: a task of the stream failed.
        """
        code = self._wait(torch.npu.current_stream(device).npu_stream)
        if code:
            message = (self._message() or b"").decode(errors="replace")
            raise RuntimeError(f"{device}: work on the current stream failed with error {code}. {message}")


# Flat CPU tensors over the bytes of a storage, by (address, bytes, type). They own nothing, so one whose memory has
# been freed does no harm.
_flat: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
_FLAT_LIMIT = 16384


def _flat_over(key: tuple[int, int, torch.dtype]) -> torch.Tensor:
    if len(_flat) >= _FLAT_LIMIT:
        _flat.clear()
    address, size, dtype = key
    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(address, _CPU, size)
        flat = torch.empty(0, dtype=dtype, device=_CPU)
        flat.set_(storage, 0, (size // flat.element_size(),), (1,))
    _flat[key] = flat
    return flat


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes as an npu tensor: same sizes, strides and offset, shared memory."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        if tensor.numel():
            raise RuntimeError(
                f"A tensor of shape {tuple(tensor.shape)} on {tensor.device} is used, and its storage was resized to 0 "
                "bytes."
            )
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU)
    key = (storage.data_ptr(), size, tensor.dtype)
    flat = _flat.get(key)
    if flat is None:
        flat = _flat_over(key)
    alias = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if tensor.is_conj():
        torch._C._set_conj(alias, True)
    if tensor.is_neg():
        torch._C._set_neg(alias, True)
    return alias


def to_device(value: Any, device: torch.device) -> Any:
    """A new npu tensor with the values and strides of a CPU tensor; lists item by item, anything else as it is."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return value
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        if value.layout != torch.strided:
            raise NotImplementedError(f"Tensors of layout {value.layout} are not simulated.")
        strides = value.stride()
        if 0 in strides and value.numel() > 1:
            # Expanded: several elements share their bytes.
            value = value.contiguous()
            strides = value.stride()
        out = torch.empty_strided(value.size(), strides, dtype=value.dtype, device=device)
        if value.numel():
            on_host(out).copy_(value)
        return out
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value


def _draw_generator(generator: torch.Generator, draws: int) -> torch.Generator:
    """A CPU generator that stands for the npu generator's (seed, offset); advances that offset, in fours as devices."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + (draws + 3) // 4 * 4)
    # Multiplied by two odd constants so that neighbouring seeds and offsets give unrelated streams.
    mixed = (seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9) % (1 << 63)
    return torch.Generator(_CPU).manual_seed(mixed)


def _npu_generator(given: torch.Generator | None, device: torch.device) -> torch.Generator:
    if given is not None:
        if given.device.type != "npu":
            raise RuntimeError(f"Expected a 'npu' device type for generator but found '{given.device.type}'")
        if given.device.index is not None and device.index is not None and given.device != device:
            raise RuntimeError(f"Expected a generator of {device} but found one of {given.device}")
        return given
    torch.npu._lazy_init()
    return torch.npu.default_generators[device.index or 0]


def _flatten(value: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else value


def _empty_on_host(value: torch.Tensor | list[torch.Tensor]) -> Any:
    new = [torch.empty(0, dtype=t.dtype, device=_CPU) for t in _flatten(value)]
    return new[0] if isinstance(value, torch.Tensor) else new


class HostKernel:
    """The npu kernel of one operator: a function of CPU tensors over the same bytes.

    Args:
        op: The operator.
        streams: The queues of the devices.
        function: The function; by default the operator itself, which on CPU tensors is the CPU's kernel.
    """

    def __init__(self, op: torch._ops.OpOverload, streams: Streams, function: Kernel | None = None) -> None:
        schema = op._schema
        self.call = function or op._op
        self.streams = streams
        self.pending = streams.pending
        self.full_name = schema.name
        self.name = schema.name.partition("::")[2]
        self.indexing = self.name in INDEXING
        self.foreach = self.name.startswith("_foreach")
        self.mixed_lists = self.name in MIXED_DEVICES
        # Each index of their lists may be on a device of its own.
        self.by_index = self.name.startswith(("_foreach", "_fused_ada", "_fused_sgd", "_amp_foreach"))
        self.mixed = self.mixed_lists or self.by_index
        # Only an input may be a number in a tensor of the host.
        self.targets = {
            key
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for key in (index, argument.name)
        }
        self.random = torch.Tag.nondeterministic_seeded in op.tags and self.name not in CPU_ATTENTION
        self.takes_generator = any(argument.name == "generator" for argument in schema.arguments)
        # By position, then by name: the parts of a call that may hold tensors or name a device.
        self.kinds: list[str] = []
        self.kind_of: dict[str, str] = {}
        self.out_names = [a.name for a in schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write]
        for argument in schema.arguments:
            text = str(argument.type)
            kind = "tensor" if "Tensor" in text else "device" if "Device" in text else ""
            if "List" in text and kind:
                kind = "tensors"
            self.kind_of[argument.name] = kind
            if not argument.kwarg_only:
                self.kinds.append(kind)
        # Where a returned tensor is an argument written to: that argument's position or name.
        self.written: list[int | str | None] = []
        for result in schema.returns:
            source = None
            if result.alias_info is not None and result.alias_info.is_write:
                for index, argument in enumerate(schema.arguments):
                    if argument.alias_info and argument.alias_info.before_set & result.alias_info.before_set:
                        source = argument.name if argument.kwarg_only else index
            self.written.append(source)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = None
        strangers = 0
        host_args: list[Any] = list(args)
        for index, kind in enumerate(self.kinds[: len(args)]):
            value = args[index]
            if not kind or value is None:
                continue
            if kind == "tensor":
                if not isinstance(value, torch.Tensor):
                    continue  # a number
                if value.is_cpu:
                    strangers += (value.dim() > 0 or index in self.targets) and not self.mixed
                else:
                    device = self._same(device, value)
                    host_args[index] = on_host(value)
            elif kind == "tensors":
                host_args[index], device, more = self._list(value, device)
                strangers += more
            else:
                device, host_args[index] = (value, _CPU) if value.type != "cpu" else (device, value)
        host_kwargs = kwargs
        if kwargs:
            host_kwargs = {}
            for name, value in kwargs.items():
                kind = self.kind_of[name]
                if kind == "tensor" and isinstance(value, torch.Tensor):
                    if value.is_cpu:
                        strangers += (value.dim() > 0 or name in self.targets) and not self.mixed
                    else:
                        device = self._same(device, value)
                        value = on_host(value)
                elif kind == "tensors" and value is not None:
                    value, device, more = self._list(value, device)
                    strangers += more
                elif kind == "device" and value is not None and value.type != "cpu":
                    device, value = value, _CPU
                elif name == "pin_memory":
                    value = None
                host_kwargs[name] = value
        if device is None or device.index is None:
            device = torch.device("npu", torch.npu.current_device())
        if strangers:
            raise self._two_devices(device, _CPU)
        if self.by_index:
            self._check_by_index([*args, *kwargs.values()])
        if self.streams.forked:
            raise RuntimeError(
                f"{self.full_name}: the devices were in use when this process was forked, and a forked process cannot "
                "go on with them. Start it with spawn, or fork before the first tensor is on a device."
            )
        if self.indexing:
            self._check_indices(*args)
        if self.pending.value:
            self.streams.wait(device)
        if self.out_names:
            return self._into_out(args, kwargs, host_args, host_kwargs, device)
        return self._answer(args, kwargs, self._run(host_args, host_kwargs, device), device)

    def _two_devices(self, one: torch.device, other: torch.device) -> RuntimeError:
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{one} and {other}! (when checking the arguments of {self.full_name})"
        )

    def _same(self, device: torch.device | None, value: torch.Tensor) -> torch.device:
        if device is not None and device.index is not None and device != value.device and not self.mixed:
            raise self._two_devices(device, value.device)
        return value.device

    def _list(self, values: Any, device: torch.device | None) -> tuple[list[Any], torch.device | None, int]:
        host = []
        strangers = 0
        for value in values:
            if value is None or value.is_cpu:
                host.append(value)
                strangers += value is not None and not self.mixed
            else:
                device = self._same(device, value)
                host.append(on_host(value))
        return host, device, strangers

    def _check_by_index(self, values: list[Any]) -> None:
        lists = [value for value in values if isinstance(value, (list, tuple)) and value]
        for tensors in zip(*(value for value in lists if isinstance(value[0], torch.Tensor)), strict=False):
            devices = {
                tensor.device for tensor in tensors if tensor is not None and (tensor.dim() or not tensor.is_cpu)
            }
            if len(devices) > 1:
                raise self._two_devices(*sorted(devices, key=str)[:2])

    def _check_indices(
        self, tensor: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor | None = None, *_: Any
    ) -> None:
        for index in indices:
            if index is not None and not index.is_cpu and index.device != tensor.device:
                raise RuntimeError(
                    "indices should be either on cpu or on the same device as the indexed tensor "
                    f"({tensor.device}), but one is on {index.device}"
                )
        if values is not None and values.device != tensor.device and values.dim() > 0:
            raise self._two_devices(tensor.device, values.device)

    def _run(self, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        if self.random:
            return self._draw(device, args, kwargs)
        return self._compute(args, kwargs)

    def _compute(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return self.call(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if f"Could not run '{self.full_name}" in str(error):
                raise NotImplementedError(
                    f"simulated devices have no kernel for {self.full_name}: it is one of the device's own, and the "
                    "CPU has none that could stand in for it."
                ) from None
            if not any(f"not implemented for '{kind}'" in str(error) for kind in ("Half", "BFloat16")):
                raise
            return self._in_float32(args, kwargs)

    def _in_float32(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """For the few kernels that the CPU has for float32 only."""
        half: list[tuple[torch.Tensor, torch.Tensor]] = []

        def up(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                half.append((value, value.float()))
                return half[-1][1]
            return [up(item) for item in value] if isinstance(value, (list, tuple)) else value

        result = self.call(*[up(value) for value in args], **{name: up(value) for name, value in kwargs.items()})
        dtype = half[0][0].dtype
        if any(source is not None for source in self.written):
            for original, wide in half:
                original.copy_(wide)

        def down(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(dtype) if value.dtype == torch.float32 else value
            return type(value)(down(item) for item in value) if isinstance(value, (list, tuple)) else value

        return down(result)

    def _draw(self, device: torch.device, args: list[Any], kwargs: dict[str, Any]) -> Any:
        sizes = [value.numel() for value in args if isinstance(value, torch.Tensor)] or [1024]
        if self.takes_generator:
            generator = _npu_generator(kwargs.get("generator"), device)
            return self._compute(args, {**kwargs, "generator": _draw_generator(generator, max(sizes))})
        # The CPU kernel draws from the process's own generator: lend it a state, and put its own back.
        generator = _draw_generator(_npu_generator(None, device), max(sizes))
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(generator.get_state())
        try:
            return self._compute(args, kwargs)
        finally:
            torch.default_generator.set_state(state)

    def _into_out(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        host_args: list[Any],
        host_kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        """With ``out=``: the CPU kernel may have to give the result another size, which an alias cannot grow to."""
        outs = {name: kwargs[name] for name in self.out_names if kwargs.get(name) is not None}
        for name, out in outs.items():
            for given, host in zip(args, host_args, strict=True):
                if given is out:  # in place: the CPU refuses to resize what is an argument too
                    host_kwargs[name] = host
        fresh = {
            name
            for name, out in outs.items()
            if any(t.untyped_storage().nbytes() == 0 for t in _flatten(out)) and not any(out is arg for arg in args)
        }
        for name in fresh:
            host_kwargs[name] = _empty_on_host(outs[name])
        try:
            self._run(host_args, host_kwargs, device)
        except RuntimeError as error:
            if "not resizable" not in str(error):
                raise
            # Empty, for the warning that a result has another size than `out` has been given by now.
            fresh = set(outs)
            host_kwargs.update({name: _empty_on_host(out) for name, out in outs.items()})
            self._run(host_args, host_kwargs, device)
        for name, value in outs.items():
            for out, host in zip(_flatten(value), _flatten(host_kwargs[name]), strict=True):
                if host.size() != out.size():
                    out.resize_(host.size())
                    out.as_strided_(host.size(), host.stride())
                if name in fresh and host.numel():
                    on_host(out).copy_(host)
        results = [
            kwargs.get(source) if isinstance(source, str) else args[source]
            for source in self.written
            if source is not None
        ]
        return results[0] if len(results) == 1 else tuple(results) or None

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: torch.device) -> Any:
        written = self.written
        if not written:
            return None
        if len(written) == 1:
            source = written[0]
            if source is None and self.foreach:
                return [to_device(item, like.device) for item, like in zip(result, args[0], strict=True)]
            if source is None:
                return to_device(result, device)
            return kwargs[source] if isinstance(source, str) else args[source]
        return tuple(
            to_device(value, device)
            if source is None
            else (kwargs[source] if isinstance(source, str) else args[source])
            for source, value in zip(written, result, strict=True)
        )


def _host_or_same(tensor: torch.Tensor, streams: Streams) -> torch.Tensor:
    if tensor.device.type != "npu":
        return tensor
    if streams.pending.value:
        streams.wait(tensor.device)
    return on_host(tensor)


def _copies(streams: Streams) -> dict[str, Kernel]:
    """Copies between and within devices, of any type and strides."""

    def new(
        source: torch.Tensor, dtype: torch.dtype, device: torch.device, memory_format: torch.memory_format | None
    ) -> torch.Tensor:
        """A new npu tensor with the values of ``source``, which is on the host."""
        strides = source.stride()
        if memory_format not in (None, torch.preserve_format) or not source.is_contiguous():
            shape = torch.empty_strided(source.size(), strides, device="meta")
            strides = torch.empty_like(shape, memory_format=memory_format or torch.preserve_format).stride()
        out = torch.empty_strided(source.size(), strides, dtype=dtype, device=device)
        if source.numel():
            # The allocator may have given memory that queued work, earlier on this stream, still uses.
            _host_or_same(out, streams).copy_(source)
        return out

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        _host_or_same(target, streams).copy_(_host_or_same(source, streams))
        return target

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        _host_or_same(target, streams).copy_(_host_or_same(source, streams))
        return target

    def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.resize_(source.size())
        return copy_from(source, target)

    def to_copy(
        tensor: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        device = tensor.device if device is None else device
        source = _host_or_same(tensor, streams)
        if device.type == "npu":
            return new(source, dtype or tensor.dtype, device, memory_format)
        copied = aten._to_copy.default(
            source, dtype=dtype, device=_CPU, pin_memory=pin_memory, memory_format=memory_format
        )
        return copied if device.type == "cpu" else copied.to(device)

    def clone(tensor: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
        return new(_host_or_same(tensor, streams), tensor.dtype, tensor.device, memory_format)

    return {
        "copy_": copy_,
        "_copy_from": copy_from,
        "_copy_from_and_resize": copy_from_and_resize,
        "_to_copy": to_copy,
        "clone": clone,
    }


def _convolution(*args: Any) -> torch.Tensor:
    """Contiguous, as torch's shape function says for devices of this kind."""
    return aten.convolution.default(*args).contiguous()


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """`convolution_backward_overrideable` of CPU tensors, for which the CPU has no kernel of that name."""
    bias_sizes = [weight.size(1) * groups if transposed else weight.size(0)]
    options = (stride, padding, dilation, transposed, output_padding, groups, output_mask)
    return aten.convolution_backward.default(grad, x, weight, bias_sizes, *options)


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As the CPU's kernel, with the mask drawn from the npu generator."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = 1 - p
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(keep)
    scale = 0.0 if keep == 0 else 1 / keep
    return x * mask * scale, mask


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty CPU tensor of the same sizes, strides and type; of the example's where the compiler leaves one open."""
    sizes, strides = (
        [n if isinstance(n, int) else n.node.hint for n in numbers] for numbers in (tensor.size(), tensor.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=_CPU)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The CPU's choice between its flash kernel and plain operators, for the same numbers as on the CPU."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    mask_learns = attn_mask is not None and attn_mask.requires_grad
    # Only what describes a tensor matters for the choice, and a FakeTensor, say, has no more than that.
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        host = [None if t is None else _like(t) for t in (query, key, value, attn_mask)]
        choice = torch._fused_sdp_choice(*host, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zero.masked_fill_(attn_mask.logical_not(), float("-inf"))
    if choice == flash and not mask_learns:
        if query.dim() == 3:  # without a batch
            if attn_mask is not None:
                attn_mask = attn_mask.expand(1, *(1,) * (3 - attn_mask.dim()), *attn_mask.shape)
            batch = (t.unsqueeze(0) for t in (query, key, value))
            return aten._scaled_dot_product_flash_attention_for_cpu(
                *batch, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0].squeeze(0)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]


_AUTOGRAD_OTHER = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)


def _generic_autograd(op: torch._ops.OpOverload) -> Kernel:
    """The autograd formula that all other devices use; torch_npu's own calls operators of the device."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        below = keyset.remove(torch._C.DispatchKey.AutogradPrivateUse1) | _AUTOGRAD_OTHER
        if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher):
            # The compiler's own dispatch would look at the tensors anew, and come back here.
            with torch._C._DisablePythonDispatcher():
                return op.redispatch(below.remove(torch._C.DispatchKey.PythonDispatcher), *args, **kwargs)
        return op.redispatch(below, *args, **kwargs)

    return kernel


def _operators() -> dict[str, torch._ops.OpOverload]:
    """All operators of aten by their full name, ``add.Tensor``."""
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::"):
            base, _, overload = full[6:].partition(".")
            # torch_npu also registers kernels under names that have no schema.
            op = getattr(getattr(aten, base, None), overload or "default", None)
            if op is not None:
                found[full[6:]] = op
    return found


def register(streams: Streams) -> torch.library.Library:
    """Give every aten operator that torch_npu supports a kernel for simulated devices.

    Args:
        streams: The queues of the devices.

    Returns:
        The library; the kernels live as long as it does.
    """
    library = torch.library.Library("aten", "IMPL")
    operators = _operators()
    backward = operators["convolution_backward_overrideable"]
    special = {
        **_copies(streams),
        "convolution": HostKernel(operators["convolution"], streams, _convolution),
        "convolution_overrideable": HostKernel(operators["convolution_overrideable"], streams, _convolution),
        "convolution_backward_overrideable": HostKernel(backward, streams, _convolution_backward),
        "native_dropout": _native_dropout,
        "scaled_dot_product_attention": scaled_dot_product_attention,
    }
    supported = {
        name.partition(".")[0] for name in operators if _has_kernel(f"aten::{name}", "PrivateUse1")
    } | CPU_ATTENTION
    for name, op in operators.items():
        full, base = f"aten::{name}", name.partition(".")[0]
        # The formulas of silu_backward and mish_backward serve devices that have no kernel; the CPU has one.
        composite = _has_kernel(full, "CompositeImplicitAutograd") and not _has_kernel(full, "CPU")
        own = _has_kernel(full, "PrivateUse1")
        if base in NATIVE or (composite and (base in NATIVE_COMPOSITE or not own)):
            continue
        learned = "AutogradPrivateUse1:" in torch._C._dispatch_dump(full)
        if name in special:
            kernel = special[name]
        elif composite:
            kernel = op.decompose  # the formula that all other devices use
        elif base in supported and (own or _has_kernel(full, "CPU")):
            if torch.Tag.inplace_view in op.tags or any(
                r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
            ):
                continue  # a view
            kernel = HostKernel(op, streams)
        else:
            continue
        library.impl(name, kernel, "PrivateUse1", allow_override=True)
        if learned and composite:
            library.impl(name, kernel, "AutogradPrivateUse1", allow_override=True)
        elif learned:
            library.impl(name, _generic_autograd(op), "AutogradPrivateUse1", with_keyset=True, allow_override=True)
    return library
