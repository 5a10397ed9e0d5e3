"""The stand-ins for what gloo lacks, on real gloo groups."""

import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from npu_parallel.gloo import all_to_all, dist_with_list_all_to_all, force_sum_reduction
from npu_parallel_ranks import run_ranks

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip


def chunk(source, target, dtype):
    """What source sends to target: its shape and values follow from the pair, and 2 -> anything is empty."""
    size = (source * 3 + target) % 5 if source != 2 else 0
    values = torch.arange(size * 2).reshape(size, 2) + 16 * source + 4 * target
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def exchange(rank, ranks, async_op):
    for dtype in DTYPES:
        inputs = [chunk(rank, target, dtype) for target in range(ranks)]
        want = [chunk(source, rank, dtype) for source in range(ranks)]
        outputs = [torch.zeros_like(tensor) for tensor in want]
        work = all_to_all(outputs, inputs, async_op=async_op)
        if async_op:
            assert work.wait()
            assert work.is_completed()
            outputs[0].zero_()
            work.wait()  # does not unpack again
            assert not outputs[0].any()
            outputs[0].copy_(want[0])
        else:
            assert work is None
        for got, expected in zip(outputs, want, strict=True):
            assert got.dtype == expected.dtype == dtype
            # float8 has no comparison
            assert (
                got.tolist() == expected.tolist()
                if dtype != torch.float8_e4m3fn
                else got.float().equal(expected.float())
            )
    return len(DTYPES)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("async_op", [False, True])
def test_uneven_chunks(ranks, async_op, tmp_path):
    assert run_ranks(exchange, ranks, tmp_path / "store", ranks, async_op) == [len(DTYPES)] * ranks


def awkward_tensors(rank):
    # Scalars, strided inputs and outputs, a conjugate view, gradients, nothing at all.
    outputs = [torch.zeros(()), torch.zeros(())]
    all_to_all(outputs, [torch.tensor(10.0 * rank + target) for target in range(2)])
    assert [float(tensor) for tensor in outputs] == [rank, 10.0 + rank]

    target = torch.zeros(3, 4)
    source = torch.arange(6.0).reshape(2, 3).T + 100 * rank
    all_to_all([target[:, 0:2], target[:, 2:4]], [source, source])
    assert torch.equal(target, torch.cat([torch.arange(6.0).reshape(2, 3).T + 100 * peer for peer in range(2)], dim=1))

    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    outputs = [torch.zeros(2, dtype=torch.complex64) for _ in range(2)]
    all_to_all(outputs, [conjugate, conjugate])
    assert outputs[1].tolist() == [1 - 2j, 3 + 4j]

    leaf = torch.ones(2, requires_grad=True)
    outputs = [torch.zeros(2), torch.zeros(2)]
    all_to_all(outputs, [leaf * 2, leaf * 3])
    assert outputs[0].tolist() == [2.0 + rank] * 2
    assert not outputs[0].requires_grad

    nothing = [torch.zeros(0, 3), torch.zeros(0, 3)]
    all_to_all(nothing, [torch.zeros(0, 3), torch.zeros(0, 3)])


def test_awkward_tensors(tmp_path):
    run_ranks(awkward_tensors, 2, tmp_path / "store")


def subgroups(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, base = groups[rank // 2], rank // 2 * 2
    outputs = [torch.zeros(1 + rank), torch.zeros(2 + rank)]
    inputs = [torch.full((1 + base + peer + rank % 2,), float(rank)) for peer in range(2)]
    all_to_all(outputs, inputs, group=mine)
    assert [tensor.tolist() for tensor in outputs] == [[base] * (1 + rank), [base + 1.0] * (2 + rank)]


def test_subgroups(tmp_path):
    run_ranks(subgroups, 4, tmp_path / "store")


def not_gloo(rank):
    # The fake backend moves nothing: an output keeps its values where the call arrives there, and nothing is unpacked.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    outputs = [torch.ones(1), torch.ones(1)]
    assert all_to_all(outputs, [torch.zeros(1), torch.zeros(1)], async_op=True).wait()
    assert type(all_to_all(outputs, [torch.zeros(1), torch.zeros(1)], async_op=True)).__name__ == "FakeWork"
    with pytest.raises(RuntimeError, match="FakeProcessGroup"):
        all_to_all(outputs[:1], outputs[:1])


def test_other_backends_get_the_call_unchanged(tmp_path):
    run_ranks(not_gloo, 1, tmp_path / "store")


def errors(rank):
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="1 outputs and 2 inputs"):
        all_to_all([one], [one, one])
    with pytest.raises(ValueError, match="one dtype"):
        all_to_all([one, one], [one, one.double()])


def test_errors(tmp_path):
    run_ranks(errors, 2, tmp_path / "store")


def through_the_stand_in(rank):
    # The names spmd_types 0.2.3 looks up; torch 2.14 has new names for two of them.
    warnings.filterwarnings(
        "ignore", message=r".*(all_gather_into_tensor|reduce_scatter_tensor)", category=FutureWarning
    )
    stand_in = dist_with_list_all_to_all()
    outputs = [torch.zeros(1 + rank), torch.zeros(1 + rank)]
    stand_in.all_to_all(outputs, [torch.ones(1), torch.ones(2)])
    assert outputs[1].tolist() == [1.0] * (1 + rank)

    world = stand_in.get_world_size(None)
    total = torch.ones(1)
    stand_in.all_reduce(total, op=stand_in.ReduceOp.SUM)
    gathered = torch.empty(world)
    stand_in.all_gather_into_tensor(gathered, torch.tensor([float(stand_in.get_rank(None))]))
    pieces = [torch.empty(1) for _ in range(world)]
    stand_in.all_gather(pieces, torch.ones(1))
    scattered = torch.empty(1)
    stand_in.reduce_scatter_tensor(scattered, torch.ones(2), op=stand_in.ReduceOp.SUM)
    stand_in.reduce_scatter(scattered, [torch.ones(1), torch.ones(1)], op=stand_in.ReduceOp.SUM)
    assert isinstance(dist.group.WORLD, stand_in.ProcessGroup)
    assert stand_in.get_process_group_ranks(dist.group.WORLD) == [0, 1]
    return float(total), gathered.tolist(), float(scattered)


def test_stand_in_for_torch_distributed(tmp_path):
    assert run_ranks(through_the_stand_in, 2, tmp_path / "store") == [(2.0, [0.0, 1.0], 2.0)] * 2


def test_stand_in_is_a_module():
    stand_in = dist_with_list_all_to_all()
    assert isinstance(stand_in, types.ModuleType)
    assert stand_in is dist_with_list_all_to_all()
    assert stand_in.all_to_all is all_to_all
    assert stand_in.ProcessGroup is dist.ProcessGroup
    assert "all_reduce" in dir(stand_in)
    with pytest.raises(AttributeError):
        stand_in.no_such_function  # noqa: B018
    assert dist.all_to_all is not all_to_all


def train_step(rank, force):
    mesh = dist.init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[1].weight.copy_(torch.tensor([[1.0, 2.0]]))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model[0], model):
        module.set_gradient_divide_factor(1.0)
    found = force_sum_reduction(model) if force else 0
    model(torch.tensor([[1.0, 10.0]]) * (rank + 1)).sum().backward()
    return found, model[0].weight.grad.full_tensor().tolist()


def test_force_sum_reduction(tmp_path):
    # d(sum)/dW0 = [1, 2]^T x, summed over x = (1, 10) and (2, 20).
    want = [[3.0, 30.0], [6.0, 60.0]]
    assert run_ranks(train_step, 2, tmp_path / "store", True) == [(2, want)] * 2


def test_gloo_still_lacks_the_reduction(tmp_path):
    # force_sum_reduction can go once this fails.
    with pytest.raises(AssertionError, match="PREMUL_SUM"):
        run_ranks(train_step, 2, tmp_path / "store", False)


def list_all_to_all_of_gloo(rank):
    outputs = [torch.zeros(1 + rank), torch.zeros(1 + rank)]
    dist.all_to_all(outputs, [torch.ones(1), torch.ones(2)])


def test_gloo_still_lacks_uneven_chunks(tmp_path):
    # all_to_all can go once this fails.
    with pytest.raises(AssertionError, match="invalid tensor size"):
        run_ranks(list_all_to_all_of_gloo, 2, tmp_path / "store")


def test_force_sum_reduction_without_fsdp():
    assert force_sum_reduction(torch.nn.Linear(1, 1)) == 0
