import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from jobs import succeeded, train
from ranks import RankServer


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def seeds(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A seed checkpoint of each family's debug model, made on the CPU by torchtitan's own option."""
    folders = {}
    for model in ("llama3", "deepseek_v3"):
        folder = tmp_path_factory.mktemp(f"{model}-seed")
        options = ["--checkpoint.enable", "--checkpoint.create-seed-checkpoint"]
        succeeded(train(ranks, folder, *options, model=model, batch=1))
        folders[model] = folder / "checkpoint" / "step-0"
    return folders
