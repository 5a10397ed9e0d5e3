"""Training on simulated NPUs equals training on the CPU: real torch_npu, HCCL and torchtitan, same configuration."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import degrees, from_seed, succeeded, train
from ranks import Job, RankServer

pytestmark = pytest.mark.sim(in_process=False)

# Model, processes, torchtitan's options, rows of a rank, tokens of a row.
LAYOUTS: dict[str, tuple[str, int, list[str], int, int]] = {
    "fsdp2": ("llama3", 2, [], 2, 64),
    "tp2": ("llama3", 2, degrees(tensor_parallel=2), 4, 64),
    "fsdp2_tp2": ("llama3", 4, degrees(tensor_parallel=2), 2, 64),
    "ep2": ("deepseek_v3", 2, degrees(expert_parallel=2), 2, 32),
}
STEPS = 2


@pytest.fixture(scope="module")
def sim_ranks() -> Iterator[RankServer]:
    server = RankServer("sim")
    yield server
    server.close()


def _both(
    ranks: RankServer, sim_ranks: RankServer, folder: Path, seed: Path, *options: str, **request: object
) -> tuple[Job, Job]:
    options = (*from_seed(seed), *options)
    jobs = [succeeded(train(server, folder / server.device, *options, **request)) for server in (ranks, sim_ranks)]
    assert sorted(jobs[0].column("loss")) == list(range(1, request["steps"] + 1))
    return jobs[0], jobs[1]


def test_one_device_is_the_cpu_bit_for_bit(
    ranks: RankServer, sim_ranks: RankServer, seeds: dict[str, Path], tmp_path: Path
) -> None:
    cpu, sim = _both(ranks, sim_ranks, tmp_path, seeds["llama3"], batch=2, seq_len=128, steps=3)
    assert sim.column("loss") == cpu.column("loss")
    assert sim.column("grad_norm") == cpu.column("grad_norm")


def test_the_quickstart_is_the_cpu_bit_for_bit(ranks: RankServer, sim_ranks: RankServer, tmp_path: Path) -> None:
    request = {"module": "npu_train.recipe_configs", "config": "quickstart", "recipe": "quickstart"}
    seed = tmp_path / "seed"
    shared = ["--training.steps", "3", "--metrics.log-freq", "1", "--validator.no-enable"]
    options = [*shared, "--checkpoint.create-seed-checkpoint"]
    succeeded(ranks.run({**request, "options": options, "dump_folder": str(seed)}, 1))
    start = ["--checkpoint.load-only", "--checkpoint.initial-load-path", str(seed / "checkpoint" / "step-0")]
    cpu, sim = (
        succeeded(
            server.run({**request, "options": [*shared, *start], "dump_folder": str(tmp_path / server.device)}, 1)
        )
        for server in (ranks, sim_ranks)
    )
    assert sorted(cpu.column("loss")) == [1, 2, 3]
    assert sim.column("loss") == cpu.column("loss")
    assert sim.column("grad_norm") == cpu.column("grad_norm")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_devices_are_the_cpu_with_the_same_layout(
    ranks: RankServer, sim_ranks: RankServer, seeds: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    model, world_size, options, batch, seq_len = LAYOUTS[layout]
    cpu, sim = _both(
        ranks,
        sim_ranks,
        tmp_path,
        seeds[model],
        *options,
        model=model,
        world_size=world_size,
        batch=batch,
        seq_len=seq_len,
        steps=STEPS,
    )
    assert sim.column("loss") == pytest.approx(cpu.column("loss"), rel=1e-6)
    assert sim.column("grad_norm") == pytest.approx(cpu.column("grad_norm"), rel=1e-6)
