import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import RankServer


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()
