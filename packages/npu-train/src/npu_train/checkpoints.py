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


def _problem_of_safetensors_file(file: Path) -> str | None:
    if not file.is_file():
        return f"its file {file.name} is missing"
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        # A damaged length must not be taken for an amount of memory.
        header = stream.read(min(header_size, file.stat().st_size))
    try:
        entries = json.loads(header)
        end = max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0)
        needed = 8 + header_size + int(end)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError):
        return f"its file {file.name} is cut short or damaged: its header cannot be read"
    if file.stat().st_size < needed:
        return f"its file {file.name} is cut short ({file.stat().st_size} of {needed} bytes)"
    return None


def _problem_of_safetensors(path: Path) -> str | None:
    files = sorted(path.glob("*.safetensors"))
    # One unsharded file has no index; torchtitan reads it as it is.
    if (path / "model.safetensors.index.json").is_file():
        try:
            weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
            files = [path / name for name in sorted(set(weight_map.values()))]
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return "its model.safetensors.index.json cannot be read"
    return next((problem for file in files if (problem := _problem_of_safetensors_file(file))), None)


def holds_safetensors(path: str | Path) -> bool:
    """Whether ``path`` is a folder of weights in Hugging Face's format."""
    return (Path(path) / "model.safetensors.index.json").is_file() or any(Path(path).glob("*.safetensors"))


def inspect(path: str | Path) -> str | None:
    """Why the checkpoint folder ``path`` cannot be loaded, or None where every byte that it refers to is there."""
    path = Path(path)
    if (path / ".metadata").is_file():
        return _problem_of_dcp(path)
    if holds_safetensors(path):
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
    """Whether ``name`` is what torchtitan calls the folder of a step; ``step-007`` it would look for as ``step-7``."""
    return re.fullmatch(r"step-(0|[1-9][0-9]*)", name) is not None


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


def was_checkpointed(run: str | Path) -> bool:
    """Whether a run folder has a finished checkpoint, in whatever folder in it; looks at names alone, without torch."""
    return any(is_step_name(file.parent.name) for name in INDEX_FILES for file in Path(run).glob(f"*/step-*/{name}"))


def latest(folder: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint in ``folder``."""
    return next((c for c in reversed(find_checkpoints(folder)) if c.complete), None)
