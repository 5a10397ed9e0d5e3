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


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if early_config.known_args_namespace.sim:
        from . import hook

        # Test files import torch, and it torch_npu, as they are collected.
        hook.install()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sim(in_process=True): runs on simulated Ascend devices (npu-debug)")


# Last, so that tests deselected with -m or -k count no more.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = False
    for item in items:
        marker = item.get_closest_marker("sim")
        if not isinstance(item, pytest.Function):
            continue
        if marker is not None and marker.kwargs.get("in_process", True) and "sim" not in item.fixturenames:
            item.fixturenames.insert(0, "sim")
        wanted = wanted or "sim" in item.fixturenames
    if wanted:
        # Before the first test: once a backward pass has run, torch's autograd takes no new devices.
        config.stash[_PROBLEM] = _activate()


_PROBLEM = pytest.StashKey[str]()


def _activate() -> str:
    """Why this process has no simulated devices, or ""."""
    from npu_debug.errors import InputError

    try:
        import npu_debug.sim  # noqa: F401
    except (ImportError, InputError) as error:
        return f"simulated Ascend devices cannot be used: {error}"
    return ""


@pytest.fixture(scope="session")
def sim(request: pytest.FixtureRequest) -> ModuleType:
    """``torch.npu`` on simulated devices; they stay for the rest of the process."""
    problem = request.config.stash[_PROBLEM]
    if problem:
        (pytest.fail if request.config.getoption("--sim") else pytest.skip)(problem)
    import torch

    return torch.npu
