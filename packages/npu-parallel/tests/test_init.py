"""layout_independent_init against a plain tensor filled in this process from the same seed."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from npu_parallel.init import layout_independent_init
from npu_parallel_ranks import run_ranks

SHAPE = (10, 7)  # neither is a multiple of 4, 10 is one of 2
INITIALISERS = {
    "normal": lambda t: torch.nn.init.normal_(t, std=0.02),
    "trunc_normal": lambda t: torch.nn.init.trunc_normal_(t, std=0.02),
    "kaiming_uniform": torch.nn.init.kaiming_uniform_,
    "orthogonal": torch.nn.init.orthogonal_,
}
LAYOUTS = {
    "replicated": ((4,), [Replicate()]),
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "rows_and_columns": ((2, 2), [Shard(0), Shard(1)]),
    "rows_twice": ((2, 2), [Shard(0), Shard(0)]),
    "fsdp_and_tp_rows": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "fsdp_and_tp_columns": ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
}


def one_rank(seed, initialise, dtype=torch.float32, shapes=(SHAPE,)):
    """The parameters a run on one rank gets, and the next number of its generator."""
    torch.manual_seed(seed)
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
    for tensor in tensors:
        initialise(tensor)
    return tensors, torch.rand(())


def new_seed():
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return seed


def check_layouts(rank, seed):
    checked = 0
    for mesh_shape, placements in LAYOUTS.values():
        mesh = dist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
        for name, initialise in INITIALISERS.items():
            for dtype in (torch.float32, torch.bfloat16):
                if name == "orthogonal" and dtype == torch.bfloat16:
                    continue  # the QR decomposition has no bfloat16
                (want,), want_next = one_rank(seed, initialise, dtype)
                local = DTensor.from_local(torch.empty(SHAPE, dtype=dtype), mesh, [Replicate()] * mesh.ndim)
                tensor = torch.nn.Parameter(local.redistribute(mesh, placements))
                torch.manual_seed(seed)
                result = layout_independent_init(initialise)(tensor)
                got_next = torch.rand(())
                assert result is tensor
                assert tensor.dtype == dtype
                assert tensor.requires_grad
                assert tensor.placements == tuple(placements)
                # full_tensor() shares no code with the wrapper's way from the full tensor to the shard: it gathers.
                assert torch.equal(tensor.full_tensor(), want), (mesh_shape, placements, name, dtype)
                assert torch.equal(got_next, want_next)
                checked += 1
    return checked


def test_values_and_generator_do_not_depend_on_the_layout(tmp_path):
    per_layout = 2 * len(INITIALISERS) - 1
    assert run_ranks(check_layouts, 4, tmp_path / "store", new_seed()) == [per_layout * len(LAYOUTS)] * 4


def check_sharding_without_the_wrapper(rank, seed):
    mesh = dist.init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.empty(8, 4), mesh, [Shard(0)])
    torch.manual_seed(seed)
    torch.nn.init.normal_(tensor.to_local())
    first, second = tensor.full_tensor().chunk(2)
    return torch.equal(first, second)


def test_plain_shards_are_copies_of_each_other(tmp_path):
    # The premise of the wrapper.
    assert run_ranks(check_sharding_without_the_wrapper, 2, tmp_path / "store", new_seed()) == [True, True]


def shard_shapes(rank, columns):
    mesh = dist.init_device_mesh("cpu", (4,))
    tensor = distribute_tensor(torch.empty(columns, 3), mesh, [Shard(0)])
    torch.manual_seed(5)
    layout_independent_init(torch.nn.init.normal_)(tensor)
    return tensor.to_local().tolist()


@pytest.mark.parametrize("rows", [5, 2])
def test_uneven_and_empty_shards(rows, tmp_path):
    (want,), _ = one_rank(5, torch.nn.init.normal_, shapes=((rows, 3),))
    got = run_ranks(shard_shapes, 4, tmp_path / "store", rows)
    chunk = -(-rows // 4)
    assert got == [want[rank * chunk : (rank + 1) * chunk].tolist() for rank in range(4)]
    assert got[3] == []


def initialise_model(rank, seed, fsdp, tp):
    mesh = dist.init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(6, 10, bias=False), torch.nn.Linear(10, 6, bias=False))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    for parameter in model.parameters():
        layout_independent_init(torch.nn.init.xavier_uniform_)(parameter)
    strided = any(isinstance(p, _StridedShard) for parameter in model.parameters() for p in parameter.placements)
    return [parameter.full_tensor().tolist() for parameter in model.parameters()], float(torch.rand(())), strided


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_fsdp_and_tensor_parallel_model(fsdp, tp, tmp_path):
    seed = new_seed()
    want, want_next = one_rank(seed, torch.nn.init.xavier_uniform_, shapes=((10, 6), (6, 10)))
    for values, following, strided in run_ranks(initialise_model, fsdp * tp, tmp_path / "store", seed, fsdp, tp):
        assert values == [tensor.tolist() for tensor in want]
        assert following == float(want_next)
        assert strided == (tp > 1)


def returns_and_errors(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    handed = []

    def fill(t, value, *, plus=0.0):
        handed.append(t)
        t.fill_(value + plus)
        return "done"

    assert layout_independent_init(fill)(tensor, 1.0, plus=0.5) == "done"
    assert (tensor.full_tensor() == 1.5).all()
    assert handed[0].placements == (Replicate(),)
    assert handed[0].shape == (4, 2)

    def fill_first_row(t):
        t.to_local()[0] = 1.0

    assert layout_independent_init(fill_first_row)(tensor) is None
    assert tensor.full_tensor()[1:].isnan().all()

    partial = DTensor.from_local(torch.zeros(4, 2), mesh, [Partial()])
    with pytest.raises(ValueError, match="Partial placement"):
        layout_independent_init(fill)(partial, 1.0)


def test_returns_arguments_and_errors(tmp_path):
    run_ranks(returns_and_errors, 2, tmp_path / "store")


def test_plain_tensors_are_handed_on():
    tensor = torch.empty(3)
    handed = []

    @layout_independent_init
    def fill(t, value):
        """Fill."""
        handed.append(t)
        return t.fill_(value)

    assert fill(tensor, 2.0) is tensor
    assert handed[0] is tensor
    assert fill.__doc__ == "Fill."
