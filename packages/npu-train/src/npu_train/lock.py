"""One run at a time writes to a run folder."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from .console import say
from .errors import InputError

LOCK_FILE = ".lock"


def _lock(file: int, kind: int, folder: str | Path) -> bool:
    """Whether the lock was taken; False where the file system has no locks.

    Raises:
        InputError: another run holds it.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "its process is not known"
        raise InputError(
            f"another run is writing to {folder} ({holder}). Wait for it to end, or choose another --dump-folder."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return False
    return True


def refuse_if_locked(folder: str | Path) -> None:
    """Find out early whether another run holds ``folder``, without holding it.

    Raises:
        InputError: it does.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        file = os.open(Path(folder) / LOCK_FILE, os.O_RDONLY)
        try:
            # Shared: the nodes of a job look at the same time.
            _lock(file, fcntl.LOCK_SH, folder)
        finally:
            os.close(file)


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold ``folder``, which is made if need be. The kernel lets go of it when the process ends, however it ends.

    Raises:
        InputError: another run holds it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = os.open(Path(folder) / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if _lock(file, fcntl.LOCK_EX, folder):
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        else:
            say(f"note: the file system of {folder} has no locks: start no second run in it.")
        yield
    finally:
        os.close(file)
