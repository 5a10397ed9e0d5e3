"""npu_parallel.layout against the rules torchtitan and torch apply themselves."""

import itertools
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

from npu_parallel.layout import FLEX_BLOCK_SIZE, SCHEDULES, Layout, ModelShape, check, resolve, seq_len_divisor

WORLD_SIZES = range(1, 9)
BACKENDS = ["spmd_types", "partial_dtensor", "full_dtensor"]


@pytest.fixture
def fake_group():
    """Start a group of fake ranks of any size in this process; whatever was started last is ended."""

    def start(world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def torchtitan_dims(layout, world_size, **options):
    return ParallelDims(
        layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.ep, world_size, **options
    )


def test_degrees():
    """Every mesh of degrees up to 4, on 1 to 8 ranks."""
    legal = 0
    for world_size in WORLD_SIZES:
        for degrees in itertools.product([1, 2, 3, 4], [-1, 1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]):
            layout = Layout(*degrees)
            try:
                dims = torchtitan_dims(layout, world_size)
            except AssertionError:
                assert check(layout, world_size), (layout, world_size)
            else:
                assert check(layout, world_size) == [], (layout, world_size)
                assert resolve(layout, world_size).dp_shard == dims.dp_shard
                legal += 1
    assert legal > 100


@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "cp", "tp", "pp"])
@pytest.mark.parametrize("degree", [0, -1, -2])
def test_degrees_below_one(name, degree):
    layout = Layout(**{"dp_shard": 1, name: degree})
    if name == "dp_shard" and degree == -1:
        assert check(layout, 1) == []
        return
    # torchtitan also refuses ep < 1, with the same assertion.
    with pytest.raises(AssertionError):
        torchtitan_dims(layout, 1)
    assert [problem.where for problem in check(layout, 1)] == [name]


@pytest.mark.parametrize("backend", BACKENDS)
def test_expert_degrees_build_a_mesh(backend, fake_group, monkeypatch):
    """torchtitan builds its meshes just where check finds nothing, for all meshes and ep degrees of 1 to 8 ranks."""
    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    monkeypatch.setattr(parallel_dims.logger, "level", logging.WARNING)
    counts = {True: 0, False: 0}
    for world_size in WORLD_SIZES:
        fake_group(world_size)
        for degrees in itertools.product([1, 2, 3, 4, 5, 6, 7, 8], repeat=5):
            if math.prod(degrees) != world_size:
                continue
            for ep in (1, 2, 3, 4, 6, 8):
                layout = Layout(*degrees, ep)
                try:
                    torchtitan_dims(layout, world_size, spmd_backend=backend).build_mesh()
                except (RuntimeError, ValueError, AssertionError):
                    built = False
                else:
                    built = True
                assert (check(layout, world_size) == []) == built, (layout, world_size)
                counts[built] += 1
    assert min(counts.values()) > 100


def test_heads():
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    outcomes = set()
    for tp in range(1, 17):
        config = llama3_debugmodel()
        model = config.model_spec.model
        attention = model.first_attention
        shape = ModelShape(len(model.layers), attention.n_heads, attention.n_kv_heads)
        config.parallelism.tensor_parallel_degree = tp
        try:
            model.update_from_config(config=config)
        except ValueError:
            legal = False
        else:
            legal = True
        assert (check(Layout(tp=tp), tp, shape) == []) == legal
        outcomes.add(legal)
    assert outcomes == {True, False}


def test_sequence_divisor():
    for cp, tp in itertools.product([2, 4], [1, 2, 3, 8]):
        world_size = cp * tp
        dims = ParallelDims(1, 1, cp, tp, 1, 1, world_size)
        layout = Layout(cp=cp, tp=tp)
        assert seq_len_divisor(layout, flex_attention=False) == dims.seq_len_divisor
        assert seq_len_divisor(layout) % dims.seq_len_divisor == 0


def test_sequence_blocks_of_context_parallel_flex_attention(fake_group):
    from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask

    fake_group(4)
    mesh = dist.init_device_mesh("cpu", (4,))
    with torch.compiler.set_stance("force_eager"):
        for length in (512, 640, 768, 1024):
            legal = check(Layout(cp=4), 4, seq_len=length) == []
            assert legal == (length % (4 * FLEX_BLOCK_SIZE) == 0)
            if legal:
                _create_cp_block_mask(
                    lambda b, h, q, k: q >= k, B=1, H=1, Q_LEN=length, KV_LEN=length, device_mesh=mesh
                )
            else:
                with pytest.raises(NotImplementedError, match="BLOCK_SIZE"):
                    _create_cp_block_mask(
                        lambda b, h, q, k: q >= k, B=1, H=1, Q_LEN=length, KV_LEN=length, device_mesh=mesh
                    )


def test_layers_of_stages():
    counts = {True: 0, False: 0}
    for n_layers, pp, schedule, first, last in itertools.product(
        range(1, 7), range(1, 9), ["1F1B", "Interleaved1F1B"], range(3), range(3)
    ):
        # One rank has no pipeline: torchtitan does not share out layers.
        if pp == 1:
            continue
        try:
            _generate_llm_fqn_per_model_part(pp * SCHEDULES[schedule][0], n_layers, first, last)
        except ValueError:
            legal = False
        else:
            legal = True
        problems = check(
            Layout(pp=pp),
            pp,
            ModelShape(n_layers, 1),
            schedule=schedule,
            first_stage_less_layers=first,
            last_stage_less_layers=last,
        )
        assert (problems == []) == legal, (n_layers, pp, schedule, first, last)
        counts[legal] += 1
    assert min(counts.values()) > 100


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_microbatches(schedule, fake_group):
    schedule_class = get_schedule_class(schedule)
    stages_per_rank = SCHEDULES[schedule][0]
    for pp in (2, 3, 4):
        fake_group(pp)
        indices = [0] if stages_per_rank == 1 else [0, 2 * pp - 1] if "V" in schedule else [0, pp]
        n_stages = pp * stages_per_rank
        stages = [PipelineStage(torch.nn.Identity(), index, n_stages, torch.device("cpu")) for index in indices]
        for microbatches in range(1, 17):
            stage = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
            try:
                schedule_class(stage, n_microbatches=microbatches, loss_fn=lambda *_: None)
            except ValueError:
                legal = False
            else:
                legal = True
            problems = check(Layout(pp=pp), pp, local_batch_size=microbatches, schedule=schedule)
            assert (problems == []) == legal, (pp, microbatches)
