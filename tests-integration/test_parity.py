"""The loss of every step under each parallelism, against one process from the same seed checkpoint."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from jobs import degrees, from_seed, succeeded, train
from ranks import Job, RankServer

# Layout: processes, and torchtitan's options. A step has the same rows in all of them.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "fsdp2": (2, []),
    "fsdp4": (4, []),
    "ddp2": (2, degrees(data_parallel_replicate=2, data_parallel_shard=1)),
    "hsdp4": (4, degrees(data_parallel_replicate=2, data_parallel_shard=2)),
    "tp2": (2, degrees(tensor_parallel=2)),
    "cp2": (2, degrees(context_parallel=2)),
    "pp2": (2, degrees(pipeline_parallel=2)),
    "fsdp2_tp2": (4, degrees(tensor_parallel=2)),
}
EXPERT_LAYOUTS = {
    "ep2": (2, degrees(expert_parallel=2)),
    "ep4": (4, degrees(expert_parallel=4)),
}
# Rows of a step. Context parallelism splits rows, which must be long: one row of 256 tokens.
ROWS, CP_ROWS = 4, 1
CASES = [("llama3", name) for name in LAYOUTS] + [("deepseek_v3", name) for name in LAYOUTS | EXPERT_LAYOUTS]
# The experts compute in bfloat16, which many CPUs do slowly: fewer steps (the second loss already depends on the first
# update) and shorter rows.
STEPS = {"llama3": 3, "deepseek_v3": 2}
# Tokens of a row; context parallelism needs 256.
SEQ_LEN, CP_SEQ_LEN = {"llama3": 64, "deepseek_v3": 32}, 256


@pytest.fixture(scope="module")
def alone(
    ranks: RankServer, seeds: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int, int], Job]:
    """The run of one process, made once for each model, number of rows and row length."""

    @cache
    def run(model: str, rows: int, seq_len: int) -> Job:
        folder = tmp_path_factory.mktemp(f"{model}-alone")
        options = from_seed(seeds[model])
        return succeeded(train(ranks, folder, *options, model=model, batch=rows, seq_len=seq_len, steps=STEPS[model]))

    return run


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_loss_is_that_of_one_process(
    ranks: RankServer,
    seeds: dict[str, Path],
    alone: Callable[[str, int, int], Job],
    tmp_path: Path,
    model: str,
    layout: str,
) -> None:
    world_size, options = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    data_parallel = 1 if layout in ("tp2", "cp2", "pp2") else 2 if layout == "fsdp2_tp2" else world_size
    rows, seq_len = (CP_ROWS, CP_SEQ_LEN) if layout == "cp2" else (ROWS, SEQ_LEN[model])
    one = alone(model, rows, seq_len)
    job = succeeded(
        train(
            ranks,
            tmp_path,
            *options,
            *from_seed(seeds[model]),
            model=model,
            world_size=world_size,
            batch=rows // data_parallel,
            seq_len=seq_len,
            steps=STEPS[model],
        )
    )
    expected = one.column("loss")
    assert sorted(expected) == list(range(1, STEPS[model] + 1))
    assert job.column("loss") == pytest.approx(expected, rel=2e-6)
    # torch sums CPU gradient norms in float32, in an order that depends on the shards.
    assert job.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=5e-4)


def test_initial_parameters_do_not_depend_on_the_layout(
    ranks: RankServer, alone: Callable[[str, int, int], Job], tmp_path: Path
) -> None:
    """Without a seed checkpoint, from the random seed alone."""
    one = succeeded(train(ranks, tmp_path / "one", batch=ROWS, seq_len=SEQ_LEN["llama3"], steps=1))
    four = succeeded(
        train(
            ranks,
            tmp_path / "four",
            *degrees(tensor_parallel=2),
            world_size=4,
            batch=ROWS // 2,
            seq_len=SEQ_LEN["llama3"],
            steps=1,
        )
    )
    seeded = alone("llama3", ROWS, SEQ_LEN["llama3"])
    assert one.column("loss") == pytest.approx({1: seeded.column("loss")[1]}, rel=2e-6)
    assert four.column("loss") == pytest.approx(one.column("loss"), rel=2e-6)
