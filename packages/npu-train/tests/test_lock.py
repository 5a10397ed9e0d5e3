"""The lock of a run folder, held by another process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_train.errors import InputError
from npu_train.lock import LOCK_FILE, locked, refuse_if_locked

HOLD = "import sys; from npu_train.lock import locked\nwith locked(sys.argv[1]): print('held', flush=True); input()"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process that holds the lock of ``run``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_run_at_a_time(tmp_path: Path, holder: subprocess.Popen) -> None:
    folder = tmp_path / "run"
    for ask in (lambda: locked(folder).__enter__(), lambda: refuse_if_locked(folder)):
        with pytest.raises(InputError, match=rf"is writing to {folder} \(process {holder.pid} on .*--dump-folder"):
            ask()
    holder.kill()
    holder.wait()
    refuse_if_locked(folder)
    with locked(folder):
        assert (folder / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")


def test_looking_makes_nothing(tmp_path: Path) -> None:
    refuse_if_locked(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr("npu_train.lock.fcntl.flock", no_locks)
    with locked(tmp_path / "run"):
        pass
    assert "has no locks: start no second run in it" in capsys.readouterr().out
