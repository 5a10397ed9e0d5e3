"""torch's own failures of a save or a load, as sentences; whole runs are in tests-integration."""

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from npu_train.errors import reason
from npu_train.overrides.checkpoint import CheckpointFailed, _failure_in_a_sentence

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Unwritable:
    """Raises while torch writes it."""

    def __init__(self, error: BaseException):
        self.error = error

    def __reduce__(self) -> tuple:
        raise self.error


def test_a_save_that_fails(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(CheckpointFailed, match=r"^not written: No space left on device$") as failed,
        _failure_in_a_sentence(lambda why: f"not written: {why}"),
    ):
        dcp.save({"w": torch.ones(3), "x": Unwritable(full)}, checkpoint_id=tmp_path, no_dist=True)
    assert failed.value.told_by_rank == 0
    assert not (tmp_path / ".metadata").exists()


def test_ctrl_c_during_a_save(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), _failure_in_a_sentence(str):
        dcp.save({"x": Unwritable(KeyboardInterrupt())}, checkpoint_id=tmp_path, no_dist=True)


def test_a_damaged_file(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    with (
        pytest.raises(CheckpointFailed, match=r"^not read: UnpicklingError"),
        _failure_in_a_sentence("not read: {}".format),
    ):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("Failed. Do something\nelse."), "ValueError: Failed"),
        (RuntimeError(), "RuntimeError"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "No such file or directory"),
    ],
)
def test_a_reason_is_one_sentence(error: Exception, told: str) -> None:
    assert reason(error) == told


def test_the_operating_system_knows_best() -> None:
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__context__ = OSError(errno.EFBIG, "File too large")
    assert reason(error) == "File too large"
