"""Find the first tensor that is not finite in a replay of one forward and backward pass. Needs torch."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.module_tracker import ModuleTracker

# Names that wrappers of torch insert between a module and its child.
_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"}
# Elements counted at a time: the masks used for counting then take at most 64 MiB each.
_CHUNK = 1 << 26
_MAX_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first tensor that is not finite.

    Attributes:
        kind: "parameter", "buffer", "input" (of a module), "output" (of a module), "loss" (what `run` returned) or
            "gradient".
        module: Fully qualified name of the module without the names that wrappers insert; "" for the model itself.
        class_name: Class of the module.
        tensor: Which tensor of the module, such as "weight", "output[0]", "grad of output" or "grad of weight".
        shape: Shape of the tensor; the global shape for a DTensor.
        dtype: Its dtype.
        nan: Number of NaN elements; of the local shard for a DTensor.
        inf: Number of infinite elements of either sign, counted likewise.
        numel: Number of elements that were counted.
        part: Index of the model part when there are several, else None.
        note: Where the value came from, as far as it is known; may be empty.
    """

    kind: str
    module: str
    class_name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int
    numel: int
    part: int | None = None
    note: str = ""

    def __str__(self) -> str:
        where = f"{self.module or 'the model'} ({self.class_name})" if self.class_name else "the replay"
        part = "" if self.part is None else f" of model part {self.part}"
        note = f"; {self.note}" if self.note else ""
        what = self.kind if self.tensor == self.kind else f"{self.kind} '{self.tensor}'"
        return (
            f"The first tensor that is not finite is the {what} of {where}{part}, of shape "
            f"{self.shape} and {self.dtype}, with {self.nan} NaN and {self.inf} Inf among {self.numel} elements{note}."
        )


def find_nonfinite(model: nn.Module | list[nn.Module], run: Callable[[], object]) -> Finding | None:
    """Replay a forward and backward pass and report the first tensor that is not finite.

    Looked at in this order: parameters and buffers; the inputs of the model; while the replay runs, the outputs of the
    modules (a module before the modules that contain it) and the gradients of outputs and parameters; the value that
    `run` returned; the gradients that the parameters hold afterwards. If a module receives a value that is not finite
    and no module put it out, the module around it is reported, because its own code produced the value.

    Tensors that do not require a gradient and whose only non-finite values are -inf are taken for attention masks and
    are not reported, parameters excepted.

    The gradients of the parameters are set to None first and are those of the replay afterwards; nothing else that
    `run` changes (random state, running statistics, data iterators) is restored. No hook stays behind. Compiled regions
    run eagerly, so a value that only a compiled kernel produces is not found. Recomputation for activation
    checkpointing is not searched a second time.

    Distributed: makes no collective calls of its own and always calls `run` once and to its end, so that all ranks that
    take part in `run` stay in step; call it on all of them. Every rank looks at its own shard and reports what it saw,
    which may be None on some ranks.

    Args:
        model: The model, or the model parts of this rank.
        run: Runs the forward and backward pass again on the same data. What it returns, such as the loss, is searched
            too.

    Returns:
        The first finding, or None if everything was finite.

    Raises:
        Exception: Whatever `run` raises, unless something was found before it.
    """
    search = _Search(model if isinstance(model, list) else [model])
    search.check_state()
    with ExitStack() as stack:
        stack.callback(search.remove_hooks)
        search.add_hooks()
        # Compiled code does not call hooks that were added after compilation.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            result = run()
        except Exception:
            if found := search.first or search.suspect:
                return found
            raise
    search.check_result(result)
    search.check_gradients()
    return search.first


class _Search:
    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.names: dict[nn.Module, tuple[str, int | None]] = {}
        for index, part in enumerate(parts):
            for name, module in part.named_modules():
                self.names.setdefault(module, (_clean(name), index if len(parts) > 1 else None))
        self.first: Finding | None = None
        self.suspect: Finding | None = None  # a non-finite input that no module put out
        self.calls: list[tuple[nn.Module, bool]] = []  # modules that run, each with whether its inputs were finite
        self.handles: list = []
        self.hooked: set[tuple] = set()
        self.users: dict[tuple, list[str]] = {}  # modules that took the tensor of a gradient edge as input
        self.tracker = ModuleTracker()

    def check_state(self) -> None:
        for module in self.names:
            for name, parameter in module.named_parameters(recurse=False):
                parameter.grad = None
                self.report("parameter", module, name, parameter)
        for module in self.names:
            for name, buffer in module.named_buffers(recurse=False):
                self.report("buffer", module, name, buffer)

    def add_hooks(self) -> None:
        for module in self.names:
            self.handles += [
                module.register_forward_pre_hook(self.before, with_kwargs=True),
                module.register_forward_hook(self.after, with_kwargs=True),
            ]
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self.handles.append(parameter.register_hook(self.on_gradient(module, f"grad of {name}")))

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.hooked.clear()
        self.users.clear()

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        # Selective checkpointing counts operators: forward and recomputation must run the same ones. So everything is
        # counted in both, found or not, and only the first counts.
        inputs = [*_tensors(args, "input"), *_tensors(kwargs, "input")]
        counted = [(name, tensor, _count(tensor)) for name, tensor in inputs]
        if self.tracker.is_bw:
            return
        bad = [(name, tensor, count) for name, tensor, count in counted if _is_bad(tensor, count)]
        root = module in self.parts and not self.calls
        self.calls.append((module, not bad))
        if bad and root:
            self.add("input", module, *bad[0])
        elif bad and self.first is None and self.suspect is None:
            self.suspect = self.finding("input", module, *bad[0])
        for name, tensor in inputs:
            if tensor.requires_grad:
                edge = tuple(get_gradient_edge(tensor)[:2])
                self.users.setdefault(edge, []).append(self.names[module][0])
                if root:
                    self.watch(module, name, tensor)

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        outputs = list(_tensors(output, "output"))
        counted = [(name, tensor, _count(tensor)) for name, tensor in outputs]
        for name, tensor in outputs:
            if tensor.requires_grad:
                self.watch(module, name, tensor)
        if self.tracker.is_bw:
            return
        finite_inputs = True
        while self.calls:  # calls that ended with an exception are still on the stack
            called, finite_inputs = self.calls.pop()
            if called is module:
                break
        bad = [(name, tensor, count) for name, tensor, count in counted if _is_bad(tensor, count)]
        if bad and finite_inputs:
            note, fqn = "", self.names[module][0]
            if self.suspect and (not fqn or self.suspect.module.startswith(f"{fqn}.")):
                note = f"it arose in the module's own code, before it called {self.suspect.module}"
            self.add("output", module, *bad[0], note=note)

    def watch(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        edge = tuple(get_gradient_edge(tensor)[:2])
        if edge not in self.hooked:  # a module that returns the output of its child as it is
            self.hooked.add(edge)
            self.handles.append(tensor.register_hook(self.on_gradient(module, f"grad of {name}", edge)))

    def on_gradient(self, module: nn.Module, name: str, edge: tuple | None = None) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self.first is None and _is_bad(gradient, count := _count(gradient), mask_allowed=False):
                users = self.users.get(edge, [])
                inner = [u for u in users if not any(u != v and (not u or v.startswith(f"{u}.")) for v in users)]
                note = f"it comes from the backward of {', '.join(dict.fromkeys(inner))}" if inner else ""
                self.add("gradient", module, name, gradient, count, note=note)

        return hook

    def check_result(self, result: object) -> None:
        forward = self.first and self.first.kind != "gradient"
        if forward:
            return
        # A non-finite loss comes before every gradient, and so does an input that only the loss function saw.
        loss = self.suspect
        for name, tensor in _tensors(result, "result"):
            if loss is None and _is_bad(tensor, count := _count(tensor), mask_allowed=False):
                loss = Finding("loss", "", "", name, tuple(tensor.shape), str(tensor.dtype), *_nan_inf(count))
        if loss is None and isinstance(result, float) and not math.isfinite(result):
            loss = Finding("loss", "", "", "result", (), "float", int(math.isnan(result)), int(math.isinf(result)), 1)
        self.first = loss or self.first

    def check_gradients(self) -> None:
        # FSDP swaps the parameters during the pass, so that the hooks on them are not called.
        for module in reversed(list(self.names)):
            for name, parameter in reversed(list(module.named_parameters(recurse=False))):
                if self.first is None and parameter.grad is not None:
                    self.report("gradient", module, f"grad of {name}", parameter.grad)

    def report(self, kind: str, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if self.first is None and _is_bad(tensor, count := _count(tensor), mask_allowed=kind == "buffer"):
            self.add(kind, module, name, tensor, count)

    def add(
        self, kind: str, module: nn.Module, name: str, tensor: torch.Tensor, count: list[int], note: str = ""
    ) -> None:
        if self.first is None:
            self.first = self.finding(kind, module, name, tensor, count, note)

    def finding(
        self, kind: str, module: nn.Module, name: str, tensor: torch.Tensor, count: list[int], note: str = ""
    ) -> Finding:
        fqn, part = self.names[module]
        shape, dtype = tuple(tensor.shape), str(tensor.dtype)
        return Finding(kind, fqn, type(module).__name__, name, shape, dtype, *_nan_inf(count), part, note)


def _clean(name: str) -> str:
    return ".".join(piece for piece in name.split(".") if piece not in _WRAPPERS)


def _tensors(value: object, name: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested tuples, lists, mappings and dataclasses, each with its path."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == _MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        pieces = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple | list):
        pieces = [(f"{name}[{i}]" if len(value) > 1 else name, item) for i, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        pieces = [(f"{name}.{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    else:
        return
    for path, item in pieces:
        yield from _tensors(item, path, depth + 1)


@torch.no_grad()
def _count(tensor: torch.Tensor) -> list[int]:
    """Number of NaN, +Inf and -Inf elements and of elements on this rank."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if local.is_sparse:
        local = local._values()
    elif local.is_nested or local.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        local = local.values()
    if local.is_meta or local.is_quantized or not (local.is_floating_point() or local.is_complex()):
        return [0, 0, 0, local.numel()]
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    numel = local.numel()
    if numel == 0:
        return [0, 0, 0, 0]
    if local.element_size() == 1:
        local = local.float()  # comparisons are not defined for 8-bit floats
    rows = max(1, _CHUNK * local.shape[0] // numel) if local.ndim else 1
    counts = [
        torch.stack([(c != c).sum(), (c == math.inf).sum(), (c == -math.inf).sum()])
        for c in (local.split(rows) if local.ndim else (local,))
    ]
    return [*torch.stack(counts).sum(0).tolist(), numel]


def _is_bad(tensor: torch.Tensor, count: list[int], mask_allowed: bool = True) -> bool:
    nan, plus, minus, _ = count
    is_mask = mask_allowed and not tensor.requires_grad
    return bool(nan or plus or (minus and not is_mask))


def _nan_inf(count: list[int]) -> tuple[int, int, int]:
    nan, plus, minus, numel = count
    return nan, plus + minus, numel
