"""pytest: tests marked ``sim``, or that use the fixture ``sim``, run on simulated Ascend devices.

A test that starts processes of its own on simulated devices is marked ``sim(in_process=False)``: pytest's own process
is then left alone.
"""

from types import ModuleType

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("npu-debug").addoption(
        "--sim",
        action="store_true",
        help="simulated Ascend devices are required: tests marked sim fail, rather than being skipped, without them",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sim(in_process=True): runs on simulated Ascend devices (npu-debug)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("sim")
        wanted = marker is not None and marker.kwargs.get("in_process", True)
        if wanted and isinstance(item, pytest.Function) and "sim" not in item.fixturenames:
            item.fixturenames.insert(0, "sim")


@pytest.fixture(scope="session")
def sim(request: pytest.FixtureRequest) -> ModuleType:
    """``torch.npu`` on simulated devices; they stay for the rest of the process."""
    from .build import SimError

    try:
        import torch

        import npu_debug.sim  # noqa: F401
    except (ImportError, SimError) as error:
        if request.config.getoption("--sim"):
            pytest.fail(f"simulated Ascend devices cannot be used: {error}")
        pytest.skip(f"needs simulated Ascend devices: {error}")
    return torch.npu
