"""Every collective of torch.distributed over HCCL on simulated NPUs against gloo on the CPU, in the same processes.

Run by torchrun with a folder, or without it with a folder and a number of ranks, which are then forks of one process
and import torch once. Each rank writes `checks-RANK.jsonl` there, a line of JSON per check. Values are small integers,
exact in every data type, so that results must be equal. Gloo computes in float64, since it lacks some types.
"""

import datetime
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch_npu
from forks import go_on_as_ranks
from torch.distributed.device_mesh import init_device_mesh

FOLDER = Path(sys.argv[1])
if "RANK" in os.environ:
    RANK, WORLD, MEETING = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://"
else:
    WORLD, MEETING = int(sys.argv[2]), f"file://{FOLDER / 'store'}"
    RANK = go_on_as_ranks(WORLD)
NPU = torch.device("npu", RANK)
CPU = torch.device("cpu")

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
# What torch_npu moves but does not reduce, on its own account: HCCL reduces some of it.
MOVED_ONLY = [torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64]
UNKNOWN = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
# torch_npu pads what it gathers into a list; without CANN's operators by an older one, which crashes on these types.
PADDING_CRASHES = [torch.uint16, torch.uint32, torch.uint64, *UNKNOWN]
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
UNSUPPORTED = "Unsupported data type"
# More than one chunk of the shared memory that HCCL's stand-in moves data through, and no multiple of anything.
LARGE = 300_007

Result = Any


class Side:
    """One of the two worlds: its devices, its process group, and the type that it computes in."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        self.device, self.group, self.dtype = device, group, dtype

    def data(self, count: int | tuple[int, ...], source: int = RANK, low: int = -2) -> torch.Tensor:
        """What rank `source` has: integers from `low` to `low` + 4."""
        shape = (count,) if isinstance(count, int) else count
        index = torch.arange(torch.Size(shape).numel())
        return ((index * 3 + source * 7 + index // 5) % 5 + low).reshape(shape).to(self.dtype).to(self.device)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, 99, dtype=torch.int64).to(self.dtype).to(self.device)


class Checks:
    def __init__(self, file: Path, gloo: dist.ProcessGroup) -> None:
        self._file = file.open("w", buffering=1)
        self._gloo = gloo
        self._names: set[str] = set()

    def add(self, name: str, run: Callable[[], str | None]) -> None:
        """`run` returns what is wrong, or None."""
        assert name not in self._names, name
        self._names.add(name)
        try:
            wrong = run()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        self._file.write(json.dumps({"check": name, "ok": wrong is None, "detail": (wrong or "")[:600]}) + "\n")

    def same(
        self,
        name: str,
        run: Callable[[Side], Result],
        dtype: torch.dtype = torch.float32,
        reference: Callable[[Side], Result] | None = None,
        group: dist.ProcessGroup | None = None,
        gloo: dist.ProcessGroup | None = None,
    ) -> None:
        """`run` gives the same on both sides; `reference` stands for it where gloo has no such collective."""

        def compare() -> str | None:
            got = run(Side(NPU, group, dtype))
            wide = torch.complex128 if dtype.is_complex else torch.float64
            want = (reference or run)(Side(CPU, gloo or self._gloo, wide))
            return _difference(got, want, dtype)

        self.add(name, compare)

    def refused(self, name: str, run: Callable[[Side], Result], text: str, dtype: torch.dtype = torch.float32) -> None:
        """torch_npu itself says no, on every rank, before anything is started."""

        def expect() -> str | None:
            try:
                run(Side(NPU, None, dtype))
            except (RuntimeError, ValueError) as error:
                return None if text in str(error) else f"refused otherwise: {error}"
            return "not refused"

        self.add(name, expect)


def _difference(got: Result, want: Result, dtype: torch.dtype) -> str | None:
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f"{len(got)} results instead of {len(want)}"
        return next((text for pair in zip(got, want, strict=True) if (text := _difference(*pair, dtype))), None)
    if not isinstance(want, torch.Tensor):
        return None if got == want else f"{got!r} instead of {want!r}"
    if got.device.type != "npu" or got.dtype != dtype:
        return f"a result on {got.device} of {got.dtype}"
    # Compared in the wide type; what is narrower than it holds these values exactly.
    got, want = got.cpu().to(want.dtype), want.to(dtype).to(want.dtype)
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if torch.equal(got, want):
        return None
    at = (got != want).flatten().nonzero()[0].item()
    return f"element {at} is {got.flatten()[at].item()} instead of {want.flatten()[at].item()}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nonnegative(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool or not dtype.is_signed else -2


# ---- the collectives, written once for both sides ----------------------------------------------------------------


def all_reduce(side: Side, op: Any = dist.ReduceOp.SUM, count: int = 24, low: int = -2) -> torch.Tensor:
    x = side.data(count, low=low)
    dist.all_reduce(x, op, group=side.group)
    return x


def reduce(side: Side, root: int, op: Any = dist.ReduceOp.SUM, count: int = 24, low: int = -2) -> torch.Tensor | None:
    x = side.data(count, low=low)
    dist.reduce(x, root, op, group=side.group)
    return x if root == RANK else None  # elsewhere it is undefined


def all_gather(side: Side, count: int = 24) -> list[torch.Tensor]:
    out = [side.empty(count) for _ in range(WORLD)]
    dist.all_gather(out, side.data(count), group=side.group)
    return out


def all_gather_uneven(side: Side) -> list[torch.Tensor]:
    out = [side.empty(3 + 2 * rank) for rank in range(WORLD)]
    dist.all_gather(out, side.data(3 + 2 * RANK), group=side.group)
    return out


def all_gather_uneven_reference(side: Side) -> list[torch.Tensor]:
    return [side.data(3 + 2 * rank, rank) for rank in range(WORLD)]


def all_gather_single(side: Side, count: int = 24) -> torch.Tensor:
    out = side.empty(WORLD * count)
    dist.all_gather_single(out, side.data(count), group=side.group)
    return out


def reduce_scatter(side: Side, op: Any = dist.ReduceOp.SUM, count: int = 24, low: int = -2) -> torch.Tensor:
    out = side.empty(count)
    dist.reduce_scatter(out, list(side.data(WORLD * count, low=low).chunk(WORLD)), op, group=side.group)
    return out


def reduce_scatter_single(side: Side, op: Any = dist.ReduceOp.SUM, count: int = 24, low: int = -2) -> torch.Tensor:
    out = side.empty(count)
    dist.reduce_scatter_single(out, side.data(WORLD * count, low=low), op, group=side.group)
    return out


def reduce_scatter_reference(
    side: Side, op: Any = dist.ReduceOp.SUM, count: int = 24, low: int = -2, scale: float = 1
) -> torch.Tensor:
    return all_reduce(side, op, WORLD * count, low).chunk(WORLD)[RANK] * scale


def reduce_scatter_uneven(side: Side) -> torch.Tensor:
    parts = list(side.data(WORLD * WORLD + WORLD).split([2 * rank + 2 for rank in range(WORLD)]))
    out = side.empty(2 * RANK + 2)
    dist.reduce_scatter(out, parts, group=side.group)
    return out


def reduce_scatter_uneven_reference(side: Side) -> torch.Tensor:
    whole = all_reduce(side, count=WORLD * WORLD + WORLD)
    return whole.split([2 * rank + 2 for rank in range(WORLD)])[RANK]


def broadcast(side: Side, root: int, count: int = 24) -> torch.Tensor:
    x = side.data(count)
    dist.broadcast(x, root, group=side.group)
    return x


def scatter(side: Side, root: int, count: int = 24) -> torch.Tensor:
    out = side.empty(count)
    parts = list(side.data(WORLD * count).chunk(WORLD)) if root == RANK else None
    dist.scatter(out, parts, root, group=side.group)
    return out


def gather(side: Side, root: int, count: int = 24) -> list[torch.Tensor] | None:
    out = [side.empty(count) for _ in range(WORLD)] if root == RANK else None
    dist.gather(side.data(count), out, root, group=side.group)
    return out


def all_to_all_single(side: Side, count: int = 24) -> torch.Tensor:
    out = side.empty(WORLD * count)
    dist.all_to_all_single(out, side.data(WORLD * count), group=side.group)
    return out


def all_to_all_uneven(side: Side, factor: int = 1) -> torch.Tensor:
    """Rank i sends (i + 2 j) % 4 elements to rank j: some of them none."""
    send = [(RANK + 2 * to) % 4 * factor for to in range(WORLD)]
    take = [(sender + 2 * RANK) % 4 * factor for sender in range(WORLD)]
    out = side.empty(sum(take))
    dist.all_to_all_single(out, side.data(sum(send)), take, send, group=side.group)
    return out


def all_to_all_list(side: Side) -> list[torch.Tensor]:
    out = [side.empty(2 + sender + 3 * RANK) for sender in range(WORLD)]
    dist.all_to_all(out, [side.data(2 + RANK + 3 * to) for to in range(WORLD)], group=side.group)
    return out


def all_to_all_list_reference(side: Side) -> list[torch.Tensor]:
    return [side.data(2 + sender + 3 * RANK, sender) for sender in range(WORLD)]


def ring(side: Side, count: int = 24) -> torch.Tensor:
    """Even ranks send first: both sides block until the other is there."""
    out = side.empty(count)
    steps = [
        lambda: dist.send(side.data(count), (RANK + 1) % WORLD, group=side.group),
        lambda: dist.recv(out, (RANK - 1) % WORLD, group=side.group),
    ]
    for step in steps if RANK % 2 == 0 else reversed(steps):
        step()
    return out


def exchange(side: Side, count: int = 24) -> list[torch.Tensor]:
    """Everybody sends to everybody, several messages, in one batch."""
    others = [rank for rank in range(WORLD) if rank != RANK]
    out = {(rank, turn): side.empty(count + turn) for rank in others for turn in range(2)}
    operations = []
    for rank, turn in out:
        operations.append(dist.P2POp(dist.isend, side.data(count + turn, RANK + turn), rank, side.group))
        operations.append(dist.P2POp(dist.irecv, out[rank, turn], rank, side.group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return list(out.values())


def exchange_reference(side: Side, count: int = 24) -> list[torch.Tensor]:
    return [side.data(count + turn, rank + turn) for rank in range(WORLD) if rank != RANK for turn in range(2)]


def neighbours(side: Side) -> torch.Tensor:
    """Two messages between a pair of ranks arrive in the order in which they were sent."""
    other, first, second = RANK ^ 1, side.empty(5), side.empty(6)
    if RANK % 2 == 0:
        works = [dist.isend(side.data(5), other, group=side.group), dist.isend(side.data(6), other, group=side.group)]
    else:
        works = [dist.irecv(first, other, group=side.group), dist.irecv(second, other, group=side.group)]
    for work in works:
        work.wait()
    return torch.cat([first, second])


# ---- groups of checks ----------------------------------------------------------------------------------------------


def check_types(checks: Checks) -> None:
    everything = [*FLOATS, *INTEGERS, torch.uint8, torch.bool, *MOVED_ONLY, *COMPLEX]
    for dtype in [*everything, *UNKNOWN]:
        moves: dict[str, tuple[Callable[[Side], Result], Callable[[Side], Result] | None]] = {
            "all_gather": (all_gather, None),
            "all_gather_single": (all_gather_single, None),
            "broadcast": (functools.partial(broadcast, root=WORLD - 1), None),
            "scatter": (functools.partial(scatter, root=0), None),
            "gather": (functools.partial(gather, root=WORLD - 1), None),
            "all_to_all_single": (all_to_all_single, None),
            "all_to_all_uneven": (all_to_all_uneven, None),
            "all_to_all_list": (all_to_all_list, all_to_all_list_reference),
            "send_recv": (ring, None),
            "batch_isend_irecv": (exchange, exchange_reference),
        }
        for name, (run, reference) in moves.items():
            label = f"{name} {short(dtype)}"
            if dtype in PADDING_CRASHES and name in ("all_gather", "gather"):
                continue
            # Complex numbers go as pairs of real ones, by torch's own code, which torch_npu has replaced in these.
            if dtype in UNKNOWN or (dtype.is_complex and name in ("gather", "batch_isend_irecv")):
                checks.refused(label, run, UNSUPPORTED, dtype)
            else:
                checks.same(label, _positive(run, dtype), dtype, _positive(reference or run, dtype))


def _positive(run: Callable[[Side], Result], dtype: torch.dtype) -> Callable[[Side], Result]:
    """`run` with values that `dtype` has."""

    def limited(side: Side) -> Result:
        inner = side.data
        side.data = lambda count, source=RANK, low=-2: inner(count, source, max(low, nonnegative(dtype)))
        return run(side)

    return limited


def check_reductions(checks: Checks) -> None:
    for dtype in [*FLOATS, *INTEGERS, torch.uint8, torch.bool]:
        low = nonnegative(dtype)
        for name, op in REDUCTIONS.items():
            label = f"{name} {short(dtype)}"
            checks.same(f"all_reduce {label}", lambda side, op=op, low=low: all_reduce(side, op, low=low), dtype)
            checks.same(f"reduce {label}", lambda side, op=op, low=low: reduce(side, 1, op, low=low), dtype)
            reference = lambda side, op=op, low=low: reduce_scatter_reference(side, op, low=low)  # noqa: E731
            for collective in (reduce_scatter, reduce_scatter_single):
                run = lambda side, op=op, low=low, collective=collective: collective(side, op, low=low)  # noqa: E731
                if dtype in (torch.uint8, torch.bool):
                    checks.refused(f"{collective.__name__} {label}", run, UNSUPPORTED, dtype)
                else:
                    checks.same(f"{collective.__name__} {label}", run, dtype, reference)
    every = {"all_reduce": all_reduce, "reduce": lambda side, op=dist.ReduceOp.SUM: reduce(side, 0, op)}
    every |= {"reduce_scatter": reduce_scatter, "reduce_scatter_single": reduce_scatter_single}
    for name, run in every.items():
        for dtype in [*MOVED_ONLY, *UNKNOWN]:
            checks.refused(f"{name} sum {short(dtype)}", _positive(run, dtype), UNSUPPORTED, dtype)
        for bitwise in ("BAND", "BOR", "BXOR"):
            op = getattr(dist.ReduceOp, bitwise)
            text = f"Cannot use ReduceOp.{bitwise} with HCCL"
            checks.refused(
                f"{name} {bitwise.lower()} int32", lambda side, run=run, op=op: run(side, op), text, torch.int32
            )
    checks.same("all_reduce sum complex64", all_reduce, torch.complex64)


def check_averages(checks: Checks) -> None:
    premultiplied = torch_npu.distributed._make_hccl_premul_sum(2.0)
    for name, op, scale in (("avg", dist.ReduceOp.AVG, 1 / WORLD), ("premul_sum", premultiplied, 2.0)):
        for dtype in FLOATS:
            label = f"{name} {short(dtype)}"
            checks.same(
                f"all_reduce {label}",
                lambda side, op=op: all_reduce(side, op),
                dtype,
                lambda side, scale=scale: all_reduce(side) * scale,
            )
            reference = lambda side, scale=scale: reduce_scatter_reference(side, scale=scale)  # noqa: E731
            for collective in (reduce_scatter, reduce_scatter_single):
                run = lambda side, op=op, collective=collective: collective(side, op)  # noqa: E731
                checks.same(f"{collective.__name__} {label}", run, dtype, reference)
            checks.same(
                f"reduce {label}",
                lambda side, op=op: reduce(side, 0, op),
                dtype,
                lambda side, scale=scale: None if (x := reduce(side, 0)) is None else x * scale,
            )
        checks.refused(
            f"all_reduce {name} int32",
            lambda side, op=op: all_reduce(side, op),
            "can't be cast to the desired output type",
            torch.int32,
        )


def check_shapes(checks: Checks) -> None:
    checks.same("all_gather uneven", all_gather_uneven, reference=all_gather_uneven_reference)
    checks.same("reduce_scatter uneven", reduce_scatter_uneven, reference=reduce_scatter_uneven_reference)
    for dtype in (torch.float32, torch.bfloat16):
        size = f"large {short(dtype)}"
        checks.same(f"all_reduce {size}", lambda side: all_reduce(side, count=LARGE), dtype)
        checks.same(f"reduce {size}", lambda side: reduce(side, 0, count=LARGE), dtype)
        checks.same(f"broadcast {size}", lambda side: broadcast(side, 1, LARGE), dtype)
        checks.same(f"all_gather {size}", lambda side: all_gather(side, LARGE), dtype)
        checks.same(f"all_gather_single {size}", lambda side: all_gather_single(side, LARGE), dtype)
        checks.same(f"scatter {size}", lambda side: scatter(side, 1, LARGE), dtype)
        checks.same(f"gather {size}", lambda side: gather(side, 0, LARGE), dtype)
        checks.same(f"all_to_all_single {size}", lambda side: all_to_all_single(side, LARGE), dtype)
        checks.same(f"all_to_all_uneven {size}", lambda side: all_to_all_uneven(side, LARGE // 3), dtype)
        checks.same(f"send_recv {size}", lambda side: ring(side, LARGE), dtype)
        checks.same(
            f"batch_isend_irecv {size}",
            lambda side: exchange(side, LARGE),
            dtype,
            lambda side: exchange_reference(side, LARGE),
        )
        checks.same(
            f"reduce_scatter_single {size}",
            lambda side: reduce_scatter_single(side, count=LARGE),
            dtype,
            lambda side: reduce_scatter_reference(side, count=LARGE),
        )
    for root in range(WORLD):
        checks.same(f"broadcast root {root}", lambda side, root=root: broadcast(side, root))
        checks.same(f"reduce root {root}", lambda side, root=root: reduce(side, root))
        checks.same(f"scatter root {root}", lambda side, root=root: scatter(side, root))
        checks.same(f"gather root {root}", lambda side, root=root: gather(side, root))
    checks.same("all_reduce of one element", lambda side: all_reduce(side, count=1))
    checks.same(
        "all_reduce of no element", lambda side: all_reduce(side, count=0), reference=lambda side: side.empty(0)
    )
    checks.same(
        "all_gather_single of no element",
        lambda side: all_gather_single(side, 0),
        reference=lambda side: side.empty(0),
    )

    def scalar(side: Side) -> torch.Tensor:
        x = side.data(1).reshape(())
        dist.all_reduce(x, group=side.group)
        return x

    def matrix(side: Side) -> torch.Tensor:
        out = side.empty(2 * WORLD, 3, 5)
        dist.all_gather_single(out, side.data((2, 3, 5)), group=side.group)
        return out

    def strided(side: Side) -> list[torch.Tensor]:
        out = [side.empty(4, 6).t() for _ in range(WORLD)]
        dist.all_gather(out, side.data((4, 6)).t(), group=side.group)
        return out

    def view(side: Side) -> torch.Tensor:
        whole = side.data(40)
        dist.all_reduce(whole[7:31], group=side.group)
        return whole

    checks.same("all_reduce of a scalar", scalar)
    checks.same("all_gather_single of three dimensions", matrix)
    checks.refused("all_gather of transposed tensors", strided, "Tensors must be contiguous")
    checks.same("all_reduce of a part of a tensor", view)


def check_uneven_extensions(checks: Checks) -> None:
    """torch_npu's own collectives."""
    npu = torch_npu.distributed
    sizes = [rank + 1 for rank in range(WORLD)]

    def gathered(side: Side) -> torch.Tensor:
        out = side.empty(sum(sizes))
        npu.all_gather_into_tensor_uneven(out, side.data(RANK + 1), sizes)
        return out

    def scattered(side: Side) -> torch.Tensor:
        out = side.empty(RANK + 1)
        npu.reduce_scatter_tensor_uneven(out, side.data(sum(sizes)), sizes)
        return out

    matrix = [[(i + 2 * j) % 3 + 1 for j in range(WORLD)] for i in range(WORLD)]

    def exchanged(side: Side) -> torch.Tensor:
        out = side.empty(sum(row[RANK] for row in matrix))
        npu.all_to_all_vc(out, side.data(sum(matrix[RANK])), matrix)
        return out

    def exchanged_reference(side: Side) -> torch.Tensor:
        rows = [side.data(sum(row), rank).split(row)[RANK] for rank, row in enumerate(matrix)]
        return torch.cat(rows)

    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        checks.same(
            f"all_gather_into_tensor_uneven {short(dtype)}",
            gathered,
            dtype,
            lambda side: torch.cat([side.data(rank + 1, rank) for rank in range(WORLD)]),
        )
        checks.same(
            f"reduce_scatter_tensor_uneven {short(dtype)}",
            scattered,
            dtype,
            lambda side: all_reduce(side, count=sum(sizes)).split(sizes)[RANK],
        )
        checks.same(f"all_to_all_vc {short(dtype)}", exchanged, dtype, exchanged_reference)


def check_works(checks: Checks, store: dist.Store) -> None:
    def several(side: Side) -> list[torch.Tensor]:
        tensors = [side.data(100 + turn) for turn in range(8)]
        works = [dist.all_reduce(x, group=side.group, async_op=True) for x in tensors]
        for work in reversed(works):
            work.wait()
        return tensors

    def waits() -> str | None:
        """Rank 1 comes only once the others have seen that the work is not done: wait() must not block the host."""
        x = torch.ones(4, device=NPU)
        if RANK == 1:
            store.wait([f"seen-{rank}" for rank in range(WORLD) if rank != 1], datetime.timedelta(seconds=60))
        work = dist.all_reduce(x, async_op=True)
        if RANK != 1:
            early = work.is_completed()
            work.wait()
            busy = not torch.npu.current_stream().query()
            store.set(f"seen-{RANK}", "1")
            if early or not busy:
                return f"completed before the last rank came: {early}, the stream was still busy after wait: {busy}"
        else:
            work.wait()
        doubled = x * 2
        torch.npu.synchronize()
        if not work.is_completed() or not work.is_success():
            return "not completed after synchronize"
        return None if doubled.tolist() == [2.0 * WORLD] * 4 else f"{doubled.tolist()}"

    def future() -> str | None:
        x = torch.full((3,), float(RANK), device=NPU)
        (result,) = dist.all_reduce(x, async_op=True).get_future().wait()
        want = [float(sum(range(WORLD)))] * 3
        return None if result.tolist() == want else f"{result.tolist()} instead of {want}"

    def barrier() -> str | None:
        if RANK == WORLD - 1:
            time.sleep(0.3)
            store.set("late", "here")
        dist.barrier()
        return None if store.check(["late"]) else "the barrier let this rank through before the last one came"

    def streams() -> str | None:
        """Collectives issued from another stream see what that stream has computed."""
        side = torch.npu.Stream()
        x = torch.full((1000,), float(RANK + 1), device=NPU)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.mul_(2)
            dist.all_reduce(x)
        torch.npu.current_stream().wait_stream(side)
        want = float(WORLD * (WORLD + 1))
        return None if bool((x == want).all()) else f"{x[:3].tolist()} instead of {want}"

    def memory() -> str | None:
        """What is copied to the device may get memory of a freed tensor that a collective still reads."""
        if RANK == 1:
            time.sleep(0.3)
        x = torch.full((64,), float(RANK)).to(NPU)
        address = x.data_ptr()
        dist.reduce(x, 1)
        if RANK != 1:
            del x
            if torch.full((64,), 99.0).to(NPU).data_ptr() != address:
                return "the memory is not used again, so this check shows nothing"
            return None
        want = float(sum(range(WORLD)))
        return None if bool((x == want).all()) else f"{x[0].item()} instead of {want}"

    checks.same("all_reduce asynchronous, several at once", several)
    checks.add("a copy into memory of a pending collective", memory)
    checks.add("work: is_completed, wait", waits)
    checks.add("work: get_future", future)
    checks.add("barrier", barrier)
    checks.add("collectives of another stream", streams)
    checks.same("isend and irecv in order", neighbours)
    checks.refused("recv from any rank", lambda side: dist.recv(side.empty(3)), "")


def check_objects(checks: Checks) -> None:
    mine = {"rank": RANK, "text": "x" * (10 + 1000 * RANK), "list": [RANK] * RANK}
    everyone = [{"rank": r, "text": "x" * (10 + 1000 * r), "list": [r] * r} for r in range(WORLD)]

    def all_gather_object() -> str | None:
        out: list[Any] = [None] * WORLD
        dist.all_gather_object(out, mine)
        return None if out == everyone else str(out)

    def gather_object() -> str | None:
        out: list[Any] | None = [None] * WORLD if RANK == 1 else None
        dist.gather_object(mine, out, 1)
        return None if out == (everyone if RANK == 1 else None) else str(out)

    def broadcast_object_list() -> str | None:
        out = [mine, RANK] if RANK == WORLD - 1 else [None, None]
        dist.broadcast_object_list(out, WORLD - 1)
        return None if out == [everyone[-1], WORLD - 1] else str(out)

    def scatter_object_list() -> str | None:
        out: list[Any] = [None]
        dist.scatter_object_list(out, everyone if RANK == 0 else None, 0)
        return None if out == [mine] else str(out)

    def send_object_list() -> str | None:
        if RANK == 0:
            dist.send_object_list([everyone[0], 7], 1)
        elif RANK == 1:
            out: list[Any] = [None, None]
            dist.recv_object_list(out, 0)
            return None if out == [everyone[0], 7] else str(out)
        return None

    for run in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_object_list):
        checks.add(run.__name__, run)


def check_coalesced(checks: Checks) -> None:
    def gathered(side: Side) -> list[torch.Tensor]:
        out = [side.empty(WORLD * count) for count in (3, 700, 11)]
        with dist._coalescing_manager(side.group, side.device, async_ops=True) as manager:
            for x, count in zip(out, (3, 700, 11), strict=True):
                dist.all_gather_single(x, side.data(count), group=side.group)
        manager.wait()
        return out

    def scattered(side: Side) -> list[torch.Tensor]:
        out = [side.empty(count) for count in (3, 700, 11)]
        with dist._coalescing_manager(side.group, side.device, async_ops=True) as manager:
            for x, count in zip(out, (3, 700, 11), strict=True):
                dist.reduce_scatter_single(x, side.data(WORLD * count), group=side.group)
        manager.wait()
        return out

    def reduced(side: Side) -> list[torch.Tensor]:
        tensors = [side.data(count) for count in (3, 700)]
        with dist._coalescing_manager(side.group, side.device):
            for x in tensors:
                dist.all_reduce(x, group=side.group)
        return tensors

    checks.same(
        "coalesced all_gather_single",
        gathered,
        reference=lambda side: [all_gather_single(side, count) for count in (3, 700, 11)],
    )
    checks.same(
        "coalesced reduce_scatter_single",
        scattered,
        reference=lambda side: [reduce_scatter_reference(side, count=count) for count in (3, 700, 11)],
    )
    checks.same(
        "coalesced all_reduce", reduced, reference=lambda side: [all_reduce(side, count=count) for count in (3, 700)]
    )


def check_functional(checks: Checks) -> None:
    """The collectives that DTensor and the compiler use."""

    def group(side: Side) -> dist.ProcessGroup:
        return side.group or dist.group.WORLD

    def summed(side: Side) -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(side.data(24), "sum", group(side)))

    def gathered(side: Side) -> torch.Tensor:
        return functional.wait_tensor(functional.all_gather_tensor(side.data((4, 6)), 1, group(side)))

    def scattered(side: Side) -> torch.Tensor:
        return functional.wait_tensor(
            functional.reduce_scatter_tensor(side.data((4, 4 * WORLD)), "sum", 1, group(side))
        )

    def scattered_reference(side: Side) -> torch.Tensor:
        return all_reduce(side, count=16 * WORLD).reshape(4, 4 * WORLD).chunk(WORLD, 1)[RANK]

    def exchanged(side: Side) -> torch.Tensor:
        equal = [2] * WORLD
        return functional.wait_tensor(functional.all_to_all_single(side.data(2 * WORLD), equal, equal, group(side)))

    def broadcasted(side: Side) -> torch.Tensor:
        return functional.wait_tensor(functional.broadcast(side.data(24), 1, group(side)))

    checks.same("functional all_reduce", summed)
    checks.same("functional all_gather_tensor", gathered)
    checks.same("functional reduce_scatter_tensor", scattered, reference=scattered_reference)
    checks.same("functional all_to_all_single", exchanged)
    checks.same("functional broadcast", broadcasted)


def check_groups(checks: Checks) -> None:
    def pairs(backend: str) -> dist.ProcessGroup:
        """Groups of neighbours; every rank makes all of them, in the same order."""
        groups = [dist.new_group([first, first + 1], backend=backend) for first in range(0, WORLD, 2)]
        return groups[RANK // 2]

    npu, cpu = pairs("hccl"), pairs("gloo")
    checks.same("all_reduce of two ranks each", all_reduce, group=npu, gloo=cpu)
    checks.same("all_to_all of two ranks each", _in_pair, group=npu, gloo=cpu)
    alone = [dist.new_group([rank], backend="hccl") for rank in range(WORLD)][RANK]
    checks.same(
        "all_reduce of a rank alone",
        lambda side: _summed(side, alone if side.device == NPU else None),
        reference=lambda side: side.data(24),
    )
    same_again = dist.new_group(list(range(WORLD)), backend="hccl")
    checks.same("all_reduce of a second group of all ranks", all_reduce, group=same_again)
    last = dist.new_group(list(range(1, WORLD)), backend="hccl")
    checks.add("a group without rank 0", lambda: _without_rank_0(last))

    def names() -> str | None:
        backend = npu._get_backend(NPU)
        name = backend.get_hccl_comm_name(RANK % 2)
        return None if name and name != dist.group.WORLD._get_backend(NPU).get_hccl_comm_name(RANK) else repr(name)

    checks.add("groups have names of their own", names)

    def mesh() -> str | None:
        grid = init_device_mesh("npu", (WORLD // 2, 2), mesh_dim_names=("outer", "inner"))
        got = []
        for name in ("outer", "inner"):
            x = torch.tensor([float(10**RANK)], device=NPU)
            dist.all_reduce(x, group=grid.get_group(name))
            got.append(x.item())
        row, column = divmod(RANK, 2)
        want = [
            float(sum(10**rank for rank in range(WORLD) if rank % 2 == column)),
            float(sum(10**rank for rank in range(WORLD) if rank // 2 == row)),
        ]
        return None if got == want else f"{got} instead of {want}"

    checks.add("device mesh", mesh)

    def destroyed() -> str | None:
        for _ in range(3):
            group = dist.new_group(list(range(WORLD)), backend="hccl")
            x = torch.ones(1, device=NPU)
            dist.all_reduce(x, group=group)
            if x.item() != WORLD:
                return f"{x.item()}"
            dist.destroy_process_group(group)
        return None

    checks.add("groups made and destroyed", destroyed)


def _summed(side: Side, group: dist.ProcessGroup | None) -> torch.Tensor:
    x = side.data(24)
    dist.all_reduce(x, group=group)
    return x


def _in_pair(side: Side) -> torch.Tensor:
    out = side.empty(10)
    dist.all_to_all_single(out, side.data(10), group=side.group)
    return out


def _without_rank_0(group: dist.ProcessGroup) -> str | None:
    if RANK == 0:
        return None
    x = torch.tensor([RANK], device=NPU)
    dist.all_reduce(x, group=group)
    y = torch.tensor([RANK], device=NPU)
    dist.broadcast(y, 1, group=group)
    got, want = [x.item(), y.item()], [sum(range(WORLD)), 1]
    return None if got == want else f"{got} instead of {want}"


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    torch.npu.set_device(NPU)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("hccl", init_method=MEETING, rank=RANK, world_size=WORLD, timeout=timeout)
    gloo = dist.new_group(backend="gloo", timeout=timeout)
    store = dist.PrefixStore("checks", dist.distributed_c10d._get_default_store())
    checks = Checks(FOLDER / f"checks-{RANK}.jsonl", gloo)
    check_types(checks)
    check_reductions(checks)
    check_averages(checks)
    check_shapes(checks)
    check_uneven_extensions(checks)
    check_works(checks, store)
    check_objects(checks)
    check_coalesced(checks)
    check_functional(checks)
    check_groups(checks)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
