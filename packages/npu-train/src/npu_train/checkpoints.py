"""Which checkpoints a folder holds, and whether they are whole."""

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

# What is written last; torchtitan takes a folder that has one of them for a checkpoint.
INDEX_FILES = (".metadata", "model.safetensors.index.json")


@dataclass(frozen=True)
class Checkpoint:
    """One ``step-N`` folder.

    Attributes:
        step: N.
        path: The folder.
        problem: Why it cannot be loaded, or None where it is whole.
        damaged: Whether it was finished, so that torchtitan would load it, but is not whole.
    """

    step: int
    path: Path
    problem: str | None
    damaged: bool = False

    @property
    def complete(self) -> bool:
        return self.problem is None


def _problem_of_dcp(path: Path) -> str | None:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        metadata = FileSystemReader(path).read_metadata()
        stored = [(info.relative_path, info.offset + info.length) for info in metadata.storage_data.values()]
    # A cut pickle raises whatever its broken opcodes lead to.
    except Exception as error:
        return f"its .metadata cannot be read ({type(error).__name__}), the file is damaged"
    needed: dict[str, int] = {}
    for name, end in stored:
        needed[name] = max(end, needed.get(name, 0))
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        if file.stat().st_size < size:
            return f"its file {name} is cut short ({file.stat().st_size} of at least {size} bytes)"
    return None


def _problem_of_safetensors(path: Path) -> str | None:
    try:
        weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    except (ValueError, KeyError):
        return "its model.safetensors.index.json cannot be read"
    for name in sorted(set(weight_map.values())):
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            header = stream.read(header_size)
        try:
            entries = json.loads(header)
        except ValueError:
            return f"its file {name} is cut short"
        end = max((e["data_offsets"][1] for k, e in entries.items() if k != "__metadata__"), default=0)
        if file.stat().st_size < 8 + header_size + end:
            return f"its file {name} is cut short ({file.stat().st_size} of {8 + header_size + end} bytes)"
    return None


def inspect(path: str | Path) -> str | None:
    """Why the checkpoint folder ``path`` cannot be loaded, or None where every byte that it refers to is there."""
    path = Path(path)
    if (path / ".metadata").is_file():
        return _problem_of_dcp(path)
    if (path / "model.safetensors.index.json").is_file():
        return _problem_of_safetensors(path)
    return "it was not finished (no .metadata)"


def holds_weights_only(path: str | Path) -> bool:
    """Whether a whole checkpoint lacks the state of the run: safetensors, or a final checkpoint of the model alone."""
    from torch.distributed.checkpoint import FileSystemReader

    if not (Path(path) / ".metadata").is_file():
        return True
    return not any(
        name.startswith("train_state") for name in FileSystemReader(path).read_metadata().state_dict_metadata
    )


def is_step_name(name: str) -> bool:
    return re.fullmatch(r"step-\d+", name) is not None


def find_checkpoints(folder: str | Path) -> list[Checkpoint]:
    """The checkpoints in ``folder``, oldest step first, finished or not."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if is_step_name(path.name) and path.is_dir():
            problem = inspect(path)
            damaged = problem is not None and any((path / name).is_file() for name in INDEX_FILES)
            found.append(Checkpoint(int(path.name[5:]), path, problem, damaged))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest(folder: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint in ``folder``."""
    return next((c for c in reversed(find_checkpoints(folder)) if c.complete), None)
