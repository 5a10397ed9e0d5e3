"""DDP, FSDP2, DTensor and distributed checkpoints on two simulated NPUs against one process on the CPU.

The ranks are forked: what torchrun would start, with one import of torch. Each writes `checks-RANK.jsonl`, a line of
JSON per check, and a process that is started after them writes `checks-alone.jsonl`.
"""

import copy
import datetime
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_npu  # noqa: F401
from forks import fork
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import rand as dtensor_rand
from torch.distributed.tensor import randn as dtensor_randn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORLD = 2
STEPS = 4
ROWS = 8
FOLDER = Path(sys.argv[1])


class Checks:
    def __init__(self, name: str) -> None:
        self._file = (FOLDER / f"checks-{name}.jsonl").open("w", buffering=1)

    def add(self, name: str, run: Callable[[], str | None]) -> None:
        try:
            wrong = run()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        self._file.write(json.dumps({"check": name, "ok": wrong is None, "detail": (wrong or "")[:600]}) + "\n")


def close(got: Any, want: Any, relative: float = 1e-6) -> str | None:
    got, want = (torch.as_tensor(value, device="cpu").double() for value in (got, want))
    if torch.allclose(got, want, rtol=relative, atol=1e-8):
        return None
    return f"{got.tolist()} instead of {want.tolist()}"[:400]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 6))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, 16, generator=generator), torch.randint(6, (ROWS,), generator=generator)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: torch.device, rank: int, ranks: int
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the whole batch, of which this rank has its part."""
    losses, norms = [], []
    for step in steps:
        x, target = (part.chunk(ranks)[rank].to(device) for part in batch(step))
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if ranks > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses, norms


def alone(steps: range = range(STEPS)) -> tuple[list[float], list[float], nn.Module]:
    net = model()
    losses, norms = train(net, optimizer_of(net), steps, torch.device("cpu"), 0, 1)
    return losses, norms, net


def check_ddp(checks: Checks, rank: int, npu: torch.device) -> None:
    want_losses, want_norms, want = alone()
    net = nn.parallel.DistributedDataParallel(model().to(npu), device_ids=[rank], bucket_cap_mb=0.001)
    losses, norms = train(net, optimizer_of(net), range(STEPS), npu, rank, WORLD)
    checks.add("ddp losses", lambda: close(losses, want_losses))
    checks.add("ddp gradient norms", lambda: close(norms, want_norms))
    for (name, got), expected in zip(net.module.named_parameters(), want.parameters(), strict=True):
        checks.add(f"ddp {name}", lambda got=got, expected=expected: close(got.detach(), expected.detach(), 1e-4))
    with net.no_sync():
        net(batch(0)[0].chunk(WORLD)[rank].to(npu)).sum().backward()
    own = next(net.parameters()).grad.clone()
    both = [torch.empty_like(own) for _ in range(WORLD)]
    dist.all_gather(both, own)
    checks.add("ddp no_sync", lambda: "the gradients are equal" if torch.equal(*(x.cpu() for x in both)) else None)


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Module:
    net = model().to(mesh.device_type)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def check_fsdp(checks: Checks, rank: int, npu: torch.device, mesh: DeviceMesh) -> None:
    want_losses, want_norms, _ = alone()
    for label, options in (("", {}), (" kept gathered", {"reshard_after_forward": False})):
        net = sharded(mesh, **options)
        losses, norms = train(net, optimizer_of(net), range(STEPS), npu, rank, WORLD)
        checks.add(f"fsdp losses{label}", lambda losses=losses: close(losses, want_losses))
        checks.add(f"fsdp gradient norms{label}", lambda norms=norms: close(norms, want_norms))
    net = sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    losses, _ = train(net, optimizer_of(net), range(STEPS), npu, rank, WORLD)
    checks.add("fsdp losses in bfloat16", lambda: close(losses, want_losses, 0.02))
    # Checkpoint of two ranks; what the run does after it is what a resumed one must do.
    net = sharded(mesh)
    optimizer = optimizer_of(net)
    train(net, optimizer, range(2), npu, rank, WORLD)
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.save(state, checkpoint_id=str(FOLDER / "checkpoint"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole, _ = get_state_dict(net, optimizer, options=options)
    after, _ = train(net, optimizer, range(2, STEPS), npu, rank, WORLD)
    checks.add("fsdp losses after a checkpoint", lambda: close(after, want_losses[2:]))
    if rank == 0:
        torch.save(whole, FOLDER / "whole.pt")


def load(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.load(state, checkpoint_id=str(FOLDER / "checkpoint"))
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def check_other_layout(checks: Checks, npu: torch.device, mesh: DeviceMesh) -> None:
    """The checkpoint of an FSDP run, loaded with tensor parallelism, where every rank has the whole batch."""
    net = model().to(npu)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    last = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": last})
    optimizer = optimizer_of(net)
    load(net, optimizer)
    dist.barrier()
    whole = torch.load(FOLDER / "whole.pt", weights_only=True)
    for name, parameter in net.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        checks.add(
            f"loaded with tensor parallelism: {name}",
            lambda full=full, name=name: None if torch.equal(full.detach().cpu(), whole[name]) else "differs",
        )
    losses = []
    for step in range(2, STEPS):
        x, target = (part.to(npu) for part in batch(step))
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    checks.add("losses with tensor parallelism after loading", lambda: close(losses, alone()[0][2:]))


def check_dtensor(checks: Checks, rank: int, npu: torch.device, mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(6, 8, generator=generator), torch.randn(8, 5, generator=generator)
    for left in (Shard(0), Shard(1), Replicate()):
        for right in (Shard(0), Shard(1), Replicate()):
            x, y = distribute_tensor(a.to(npu), mesh, [left]), distribute_tensor(b.to(npu), mesh, [right])
            checks.add(f"dtensor matmul {left} {right}", lambda x=x, y=y: close((x @ y).full_tensor(), a @ b, 1e-5))
    x = distribute_tensor(a.to(npu), mesh, [Shard(0)])

    def moved(placement: Any) -> str | None:
        y = x.redistribute(mesh, [placement])
        return None if y.placements == (placement,) and torch.equal(y.full_tensor().cpu(), a) else f"{y}"

    for placement in (Shard(1), Replicate(), Shard(0)):
        checks.add(f"dtensor redistribute {placement}", lambda placement=placement: moved(placement))
    partial = DTensor.from_local(torch.full((4, 2), float(rank + 1), device=npu), mesh, [Partial()])
    checks.add("dtensor partial to replicate", lambda: close(partial.full_tensor(), torch.full((4, 2), 3.0)))
    checks.add(
        "dtensor partial to shard",
        lambda: close(partial.redistribute(mesh, [Shard(0)]).to_local(), torch.full((2, 2), 3.0)),
    )
    for name, run in {
        "sum": lambda t: t.sum(),
        "mean of rows": lambda t: t.mean(0),
        "softmax": lambda t: t.softmax(-1),
        "softmax along the shards": lambda t: t.softmax(0),
        "layer norm": lambda t: nn.functional.layer_norm(t, (8,)),
        "transpose": lambda t: t.t() * 2,
        "cumulative sum": lambda t: t.cumsum(0),
        "topk": lambda t: t.topk(2, 1).values,
    }.items():
        checks.add(f"dtensor {name}", lambda run=run: close(run(x).full_tensor(), run(a), 1e-5))

    uneven = distribute_tensor(torch.arange(15.0).reshape(5, 3).to(npu), mesh, [Shard(0)])
    checks.add("dtensor uneven shards", lambda: close(uneven.full_tensor(), torch.arange(15.0).reshape(5, 3)))

    def both(local: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.empty_like(local) for _ in range(WORLD)]
        dist.all_gather(out, local.contiguous())
        return [part.cpu() for part in out]

    def random(make: Callable[[Any], DTensor]) -> str | None:
        torch.manual_seed(11)
        first, second = both(make([Shard(0)]).to_local())
        if torch.equal(first, second):
            return "the shards are equal"
        first, second = both(make([Replicate()]).to_local())
        return None if torch.equal(first, second) else "the replicas differ"

    def dropped(placements: Any) -> DTensor:
        return nn.functional.dropout(distribute_tensor(torch.ones(64, 8, device=npu), mesh, placements), 0.5)

    def filled(placements: Any) -> DTensor:
        return distribute_tensor(torch.zeros(64, 8, device=npu), mesh, placements).normal_()

    checks.add("dtensor randn", lambda: random(lambda where: dtensor_randn(64, 8, device_mesh=mesh, placements=where)))
    checks.add("dtensor rand", lambda: random(lambda where: dtensor_rand(64, 8, device_mesh=mesh, placements=where)))
    checks.add("dtensor dropout", lambda: random(dropped))
    checks.add("dtensor normal_", lambda: random(filled))

    def repeated() -> str | None:
        results = []
        for _ in range(2):
            torch.manual_seed(12)
            results.append(dtensor_randn(8, 8, device_mesh=mesh, placements=[Shard(0)]).to_local().cpu())
        return None if torch.equal(*results) else "the same seed gives other values"

    checks.add("dtensor random values follow the seed", repeated)


def run_rank(rank: int) -> None:
    npu = torch.device("npu", rank)
    torch.npu.set_device(npu)
    dist.init_process_group(
        "cpu:gloo,npu:hccl",
        init_method=f"file://{FOLDER / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    checks = Checks(str(rank))
    mesh = init_device_mesh("npu", (WORLD,))
    check_ddp(checks, rank, npu)
    check_fsdp(checks, rank, npu, mesh)
    check_other_layout(checks, npu, mesh)
    check_dtensor(checks, rank, npu, mesh)
    dist.barrier()
    dist.destroy_process_group()


def run_alone(_: int) -> None:
    """The two ranks' checkpoint on one device, in a process without a process group, and on the CPU."""
    checks = Checks("alone")
    whole = torch.load(FOLDER / "whole.pt", weights_only=True)
    for device in (torch.device("npu", 0), torch.device("cpu")):
        net = model().to(device)
        optimizer = optimizer_of(net)
        before = copy.deepcopy(net.state_dict())
        load(net, optimizer)
        for name, value in net.state_dict().items():
            checks.add(
                f"loaded on one {device.type}: {name}",
                lambda name=name, value=value, before=before: (
                    None
                    if torch.equal(value.cpu(), whole[name]) and not torch.equal(value, before[name])
                    else "not loaded"
                ),
            )
        losses, _ = train(net, optimizer, range(2, STEPS), device, 0, 1)
        checks.add(f"losses on one {device.type} after loading", lambda losses=losses: close(losses, alone()[0][2:]))


def main() -> None:
    torch.set_num_threads(1)
    for run, number in ((run_rank, WORLD), (run_alone, 1)):
        children = [fork(partial(run, rank)) for rank in range(number)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{run.__name__} ended with {codes}")


if __name__ == "__main__":
    main()
