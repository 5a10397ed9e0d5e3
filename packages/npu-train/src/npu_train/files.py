"""The paths that a run reads and writes, looked at before anything heavy is imported."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import InputError

# Kinds of data file, and how they are read.
SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}


def data_files(path: str | os.PathLike) -> list[Path]:
    """The data files that ``path`` names: itself, or the files of a folder in the order of their names.

    Raises:
        InputError: nothing there, or a kind of file that is not read.
    """
    path = Path(path).expanduser()
    kinds = ", ".join(SUFFIXES)
    if not path.exists():
        raise InputError(f"data file not found: {path}. Give --data an existing {kinds} file or a folder of them.")
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
        if not files:
            raise InputError(f"the data folder {path} holds no {kinds} file.")
        return files
    if not path.is_file():
        raise InputError(f"{path} is not a regular file. Write the data to a {kinds} file first.")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: '{path.suffix}' files are not read. Convert it to one of: {kinds}.")
    return [path]


def not_read(path: str | os.PathLike) -> list[str]:
    """The names in a data folder that ``data_files`` leaves out, hidden ones apart; none where ``path`` is a file."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return []
    files = {file.name for file in data_files(path)}
    return sorted(p.name for p in path.iterdir() if p.name not in files and not p.name.startswith("."))


def unwritable(folder: Path, what: str = "output folder", option: str = "--dump-folder") -> list[str]:
    """Why ``folder`` cannot be made or written, as a problem; nothing stays behind."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"the {what} {folder} cannot be made: {existing} is a file. Choose another {option}."]
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return [
            f"the {what} {folder} cannot be written ({existing}: {error.strerror}). "
            f"Choose another {option} or change its permissions."
        ]
    return []


def path_problems(data: str, dump_folder: str, options: Sequence[str]) -> list[str]:
    """What is wrong with the paths of a run whose configuration cannot be built, so that they are told with that.

    Args:
        data: ``--data``, or "".
        dump_folder: ``--dump-folder``, or "".
        options: torchtitan's options, as given.
    """
    problems = []
    if data:
        try:
            data_files(data)
        except InputError as error:
            problems += error.problems
    if dump_folder:
        problems += unwritable(Path(dump_folder))
    for option, after in zip(options, [*options, ""][1:], strict=True):
        name, equals, value = option.partition("=")
        value = value if equals else after
        if name.replace("_", "-") == "--hf-assets-path" and not Path(value).is_dir():
            problems.append(f"--hf-assets-path: there is no folder {value}.")
    return problems
