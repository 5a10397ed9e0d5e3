"""The layout rules against hand-counted expectations; tests-integration holds them against torchtitan itself."""

import itertools
import subprocess
import sys

import pytest

from npu_parallel.layout import (
    SCHEDULES,
    Layout,
    ModelShape,
    check,
    legal_layouts,
    resolve,
    seq_len_divisor,
)

DENSE = ModelShape(n_layers=6, n_heads=16, n_kv_heads=4)
MOE = ModelShape(n_layers=6, n_heads=16, n_kv_heads=4, n_experts=8)


def only(problems):
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def degrees(layouts):
    return [(x.dp_replicate, x.dp_shard, x.cp, x.tp, x.pp, x.ep) for x in layouts]


@pytest.mark.parametrize(
    ("layout", "world_size", "dp_shard"),
    [(Layout(), 1, 1), (Layout(), 8, 8), (Layout(2, -1, 2, 2), 16, 2), (Layout(dp_shard=4, tp=2), 8, 4)],
)
def test_resolve(layout, world_size, dp_shard):
    assert resolve(layout, world_size).dp_shard == dp_shard


def test_resolve_errors():
    with pytest.raises(ValueError, match=r"tp\(3\).* does not divide the 8 ranks.*tp=1, 2, 4 or 8"):
        resolve(Layout(tp=3), 8)
    with pytest.raises(ValueError, match="tp: the degree is 0"):
        resolve(Layout(tp=0), 8)


def test_a_legal_layout_has_no_problems():
    layout = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=4, pp=2, ep=8)
    sizes = {"seq_len": 2048, "local_batch_size": 4, "global_batch_size": 32, "microbatch_size": 2}
    assert check(layout, 64, MOE, **sizes) == []


def test_world_size_lists_single_degrees_and_whole_layouts():
    problem = only(check(Layout(dp_shard=2, tp=2), 8))
    assert problem.where == "world_size"
    assert "dp_shard(2) * cp(1) * tp(2) * pp(1) = 4 is not the 8 ranks" in problem.what
    for fix in ("dp_replicate=2", "dp_shard=4", "cp=2", "tp=4", "pp=2"):
        assert fix in problem.fix
    # One doubling away, in the stable order.
    assert "Nearest legal layouts of 8 ranks: dp_shard=4 tp=2; dp_replicate=2 dp_shard=2 tp=2;" in problem.fix


def test_world_size_offers_only_what_suits_the_model():
    problem = only(check(Layout(dp_shard=1, tp=4), 8, DENSE))
    assert "tp=8" not in problem.fix
    assert "dp_shard=2" in problem.fix
    one_layer_one_head = ModelShape(n_layers=1, n_heads=1)
    problem = only(check(Layout(dp_shard=1, pp=3), 9, one_layer_one_head))
    assert "pp=9" not in problem.fix


def test_no_layout_at_all():
    # cp = 7 or dp = 7 would do, but for the sequence and the batch.
    problems = check(Layout(dp_shard=1), 7, DENSE, seq_len=128, local_batch_size=1, global_batch_size=2)
    assert "No layout of 7 ranks is legal" in only(problems).fix


def test_heads():
    problems = check(Layout(dp_shard=1, tp=8), 8, DENSE)
    assert only(problems).what == "tp(8) does not divide n_kv_heads (4)"
    assert only(problems).fix == "Use tp=1, 2 or 4"
    problems = check(Layout(dp_shard=1, tp=3), 3, DENSE)
    assert [problem.what for problem in problems] == [
        "tp(3) does not divide n_heads (16)",
        "tp(3) does not divide n_kv_heads (4)",
    ]
    assert only(check(Layout(dp_shard=1, tp=3), 3, ModelShape(6, 16))).fix == "Use tp=1, 2, 4, 8 or 16"


@pytest.mark.parametrize(
    ("layout", "options", "seq_len", "nearest"),
    [
        (Layout(tp=4), {}, 130, "multiples of 4): 128 and 132"),
        (Layout(cp=2), {}, 300, "multiples of 256): 256 and 512"),
        (Layout(cp=2), {}, 100, "multiples of 256): 256"),
        (Layout(cp=3), {}, 1000, "multiples of 384): 768 and 1152"),
        (Layout(cp=2), {"flex_attention": False}, 102, "multiples of 4): 100 and 104"),
        (Layout(cp=2, tp=3), {}, 1024, "multiples of 768): 768 and 1536"),
        (Layout(cp=2, tp=3), {"flex_attention": False}, 1024, "multiples of 12): 1020 and 1032"),
        (Layout(cp=2, tp=3), {"sequence_parallel": False, "flex_attention": False}, 1022, "of 4): 1020 and 1024"),
    ],
)
def test_sequence_length(layout, options, seq_len, nearest):
    world_size = layout.cp * layout.tp
    problem = only(check(layout, world_size, seq_len=seq_len, **options))
    assert problem.where == "seq_len"
    assert nearest in problem.fix
    for length in map(int, nearest.split("): ")[1].split(" and ")):
        assert check(layout, world_size, seq_len=length, **options) == []
        assert length % seq_len_divisor(layout, **options) == 0


@pytest.mark.parametrize("options", [{}, {"flex_attention": False}])
def test_any_length_without_sequence_splits(options):
    assert check(Layout(dp_shard=4, pp=2), 8, seq_len=101, **options) == []
    assert seq_len_divisor(Layout(dp_shard=4, pp=2), **options) == 1
    assert check(Layout(tp=2), 2, seq_len=101, sequence_parallel=False, **options) == []


def test_experts():
    problem = only(check(Layout(dp_shard=4, tp=3, ep=3), 12, ModelShape(6, 3, n_experts=8)))
    assert (problem.where, problem.what, problem.fix) == (
        "ep",
        "ep(3) does not divide the 8 experts",
        "Use ep=1, 2 or 4",
    )
    problem = only(check(Layout(dp_shard=6, ep=4), 6, MOE))
    assert problem.what == "ep(4) does not divide dp_shard(6) * cp(1) * tp(1) = 6"
    assert problem.fix == "Use ep=1 or 2"
    assert "no experts" in only(check(Layout(dp_shard=2, ep=2), 2, DENSE)).what
    assert check(Layout(dp_replicate=2, dp_shard=1, tp=2, ep=2), 4, MOE) == []
    assert check(Layout(dp_shard=1, cp=2, tp=2, ep=4), 4, MOE) == []


def test_ddp_with_experts():
    problem = only(check(Layout(dp_replicate=2, dp_shard=1, ep=2), 2, MOE))
    assert "dp_replicate lends it no ranks" in problem.what
    assert problem.fix == "Use ep=1, or shards instead of replicas: dp_replicate=1 dp_shard=2"
    assert check(Layout(1, 2, ep=2), 2, MOE) == []


@pytest.mark.parametrize(
    ("n_layers", "pp", "schedule", "legal"),
    [
        (6, 8, "1F1B", True),  # 6 layers and 2 for the ends: one for each stage
        (6, 9, "1F1B", False),
        (6, 4, "Interleaved1F1B", True),
        (6, 5, "Interleaved1F1B", False),
        (1, 2, "gpipe", True),
    ],
)
def test_layers_and_stages(n_layers, pp, schedule, legal):
    problems = check(Layout(pp=pp), pp, ModelShape(n_layers, 1), schedule=schedule)
    assert [problem.where for problem in problems] == ([] if legal else ["pp"])


def test_layers_and_stages_fix_and_weights():
    assert only(check(Layout(pp=9), 9, DENSE)).fix == "Use pp=8 or less"
    # 6 + 3 + 0 = 9 effective layers on 4 stages: 2 each, and the embedding alone counts 3.
    options = {"first_stage_less_layers": 3, "last_stage_less_layers": 0}
    assert only(check(Layout(pp=4), 4, DENSE, **options)).fix == "Use pp=3 or less"
    assert check(Layout(pp=3), 3, DENSE, **options) == []
    # Ends that count for nothing leave 6 layers for 7 stages.
    options = {"first_stage_less_layers": 0, "last_stage_less_layers": 0}
    assert only(check(Layout(pp=7), 7, DENSE, **options)).fix == "Use pp=6 or less"


@pytest.mark.parametrize(
    ("schedule", "batch", "microbatch", "fix"),
    [
        ("1F1B", 6, 4, "Use 16, or a microbatch size of 1"),
        ("1F1B", 3, 1, "Use 4"),
        ("1F1B", 6, 2, "Use 8, or a microbatch size of 1"),
        ("GPipe", 6, 4, "Use 4 or 8, or a microbatch size of 1, 2, 3 or 6"),
        ("GPipe", 3, 1, None),
        ("Interleaved1F1B", 3, 1, None),
        ("Interleaved1F1B", 8, 1, None),
        ("Interleaved1F1B", 9, 1, "Use 8 or 10, or a microbatch size of 3 or 9"),
        ("InterleavedZeroBubble", 10, 1, None),
        ("ZBVZeroBubble", 9, 1, None),
        ("DualPipeV", 7, 1, "Use 8"),
        ("LoopedBFS", 9, 1, None),
    ],
)
def test_microbatches(schedule, batch, microbatch, fix):
    options = {"local_batch_size": batch, "microbatch_size": microbatch, "schedule": schedule}
    problems = check(Layout(pp=4), 4, **options)
    if fix is None:
        assert problems == []
    else:
        assert (only(problems).where, only(problems).fix) == ("local_batch_size", fix)
    assert check(Layout(dp_shard=4), 4, **options) == []


def test_global_batch():
    problem = only(check(Layout(2, 2), 4, local_batch_size=3, global_batch_size=30))
    assert problem.fix == "Nearest legal sizes: 24 and 36"
    assert check(Layout(2, 2), 4, local_batch_size=3, global_batch_size=24) == []


def test_all_problems_at_once():
    layout = Layout(dp_replicate=0, dp_shard=2, cp=2, tp=8, pp=9, ep=3)
    problems = check(layout, 64, MOE, seq_len=1000, local_batch_size=4)
    assert [problem.where for problem in problems] == [
        "dp_replicate", "ep", "tp", "pp", "seq_len", "local_batch_size",
    ]  # fmt: skip
    assert all(str(problem) == f"{problem.where}: {problem.what}. {problem.fix}." for problem in problems)


UNUSABLE = [
    (0, DENSE, {}, "world_size is 0; it must be 1 or more"),
    (2, ModelShape(0, 4), {}, "n_layers is 0; it must be 1 or more"),
    (2, ModelShape(4, 4, n_experts=-1), {}, "n_experts is -1; it must be 0 or more"),
    (2, None, {"seq_len": 0}, "seq_len is 0; it must be 1 or more"),
    (2, None, {"local_batch_size": -1}, "local_batch_size is -1; it must be 1 or more"),
    (2, None, {"local_batch_size": 2**31}, "local_batch_size is 2147483648; it must be at most 2147483647"),
    (2, None, {"schedule": "3F3B"}, "use one of 1F1B, GPipe"),
    (2, None, {"schedule": None}, "use one of 1F1B, GPipe"),
    (2.0, None, {}, "world_size is 2.0; it must be a whole number"),
    (None, None, {}, "world_size is None; it must be a whole number"),
    (2, ModelShape(4, "4"), {}, "n_heads is '4'; it must be a whole number"),
    (2, None, {"seq_len": float("nan")}, "seq_len is nan; it must be a whole number"),
    (2, None, {"microbatch_size": None}, "microbatch_size is None; it must be a whole number"),
    (2, DENSE, {"first_stage_less_layers": -1}, "first_stage_less_layers is -1; it must be 0 or more"),
    (2, DENSE, {"last_stage_less_layers": 0.5}, "last_stage_less_layers is 0.5; it must be a whole number"),
]


@pytest.mark.parametrize(("world_size", "shape", "options", "message"), UNUSABLE)
def test_unusable_arguments(world_size, shape, options, message):
    with pytest.raises(ValueError, match=message):
        check(Layout(), world_size, shape, **options)


@pytest.mark.parametrize("degree", [1.5, float("nan"), "2", None])
def test_degrees_are_whole_numbers(degree):
    for ask in (check, resolve):
        with pytest.raises(ValueError, match=f"tp is {degree!r}; it must be a whole number"):
            ask(Layout(tp=degree), 2)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("schedule", "batch", "microbatch", "fix"),
    [
        ("Interleaved1F1B", 100_000_001, 1, "Use 100000000 or 100000002, or a microbatch size of 100000001"),
        ("1F1B", 2**31 - 2, 2**31 - 3, "Use 4294967290, or a microbatch size of 1"),
    ],
)
def test_large_batches_are_answered_at_once(schedule, batch, microbatch, fix):
    options = {"local_batch_size": batch, "microbatch_size": microbatch, "schedule": schedule}
    assert only(check(Layout(pp=2), 2, **options)).fix.startswith(fix)


def test_legal_layouts_of_two_and_four_ranks():
    assert degrees(legal_layouts(1)) == [(1, 1, 1, 1, 1, 1)]
    assert degrees(legal_layouts(2)) == [
        (1, 2, 1, 1, 1, 1),
        (2, 1, 1, 1, 1, 1),
        (1, 1, 2, 1, 1, 1),
        (1, 1, 1, 2, 1, 1),
        (1, 1, 1, 1, 2, 1),
    ]
    # Experts: DDP has none, pipeline ranks lend none.
    assert degrees(legal_layouts(2, moe=True)) == [
        (1, 2, 1, 1, 1, 1),
        (2, 1, 1, 1, 1, 1),
        (1, 2, 1, 1, 1, 2),
        (1, 1, 2, 1, 1, 1),
        (1, 1, 2, 1, 1, 2),
        (1, 1, 1, 2, 1, 1),
        (1, 1, 1, 2, 1, 2),
        (1, 1, 1, 1, 2, 1),
    ]
    assert legal_layouts(2, MOE) == legal_layouts(2, moe=True)
    # 4 = 2 * 2 over five degrees: 5 ways to put 4 on one, 10 to put 2 on two.
    assert len(legal_layouts(4)) == len(set(legal_layouts(4))) == 15
    assert degrees(legal_layouts(4, ModelShape(1, 2), seq_len=256))[-1] == (1, 1, 1, 2, 2, 1)


def test_legal_layouts_are_all_of_them():
    numbers = [1, 2, 3, 6]
    product_is_6 = {
        mesh for mesh in itertools.product(numbers, repeat=5) if mesh[0] * mesh[1] * mesh[2] * mesh[3] * mesh[4] == 6
    }
    assert {mesh[:5] for mesh in degrees(legal_layouts(6))} == product_is_6


def test_layout_text():
    assert str(Layout()) == "dp_shard=-1"
    assert str(Layout(2, 1, tp=4, ep=2)) == "dp_replicate=2 tp=4 ep=2"
    assert str(Layout(1, 1)) == "one rank"


def test_schedules_are_those_of_torch():
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    for name, (stages_per_rank, _) in SCHEDULES.items():
        assert (stages_per_rank == 1) == issubclass(get_schedule_class(name), PipelineScheduleSingle)


def test_imports_no_torch():
    code = (
        "import sys; from npu_parallel.layout import Layout, resolve; import npu_parallel; "
        "assert resolve(Layout(), 2) and npu_parallel.__version__; "
        "sys.exit(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'npu_ops')) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
