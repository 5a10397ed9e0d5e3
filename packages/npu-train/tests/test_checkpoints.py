"""Whole, unfinished and damaged checkpoints, made by torch's and safetensors' own writers."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from npu_train.checkpoints import find_checkpoints, inspect, latest, was_checkpointed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path) -> Path:
    dcp.save({"weight": torch.arange(1000.0), "bias": torch.ones(3), "step": 7}, checkpoint_id=path, no_dist=True)
    return path


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.distcp")
    return file


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    assert inspect(save(tmp_path / "step-1")) is None


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
def test_one_cut_short(tmp_path: Path, keep: float) -> None:
    file = data_file(save(tmp_path / "step-1"))
    size = file.stat().st_size
    os.truncate(file, int(keep * size) if 0 < keep < 1 else keep % size)
    problem = inspect(tmp_path / "step-1")
    assert problem is not None
    assert f"its file {file.name} is cut short ({file.stat().st_size} of at least" in problem


def test_one_with_a_file_missing(tmp_path: Path) -> None:
    file = data_file(save(tmp_path / "step-1"))
    file.unlink()
    assert inspect(tmp_path / "step-1") == f"its file {file.name} is missing"


def test_one_with_damaged_metadata(tmp_path: Path) -> None:
    metadata = save(tmp_path / "step-1") / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:40])
    assert ".metadata cannot be read" in inspect(tmp_path / "step-1")


def test_one_not_finished(tmp_path: Path) -> None:
    (save(tmp_path / "step-1") / ".metadata").unlink()
    assert inspect(tmp_path / "step-1") == "it was not finished (no .metadata)"


def test_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    save_file({"a": torch.ones(100)}, folder / "model-00001.safetensors")
    save_file({"b": torch.ones(100)}, folder / "model-00002.safetensors")
    names = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert inspect(folder) is None
    os.truncate(folder / "model-00002.safetensors", 300)
    assert "model-00002.safetensors is cut short (300 of" in inspect(folder)
    os.truncate(folder / "model-00002.safetensors", 5)
    assert "model-00002.safetensors is cut short" in inspect(folder)
    (folder / "model-00001.safetensors").unlink()
    assert inspect(folder) == "its file model-00001.safetensors is missing"


@pytest.mark.parametrize("index", ['{"weight_map": ["a"]}', "[1]", "{", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_foreign_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert inspect(tmp_path) == "its model.safetensors.index.json cannot be read"


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 8) + b'{"a":{}}',
        b"",
    ],
)
def test_a_foreign_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "its file model.safetensors is cut short" in inspect(tmp_path)


def test_one_safetensors_file_without_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    assert inspect(tmp_path) is None
    os.truncate(tmp_path / "model.safetensors", 300)
    assert "model.safetensors is cut short (300 of" in inspect(tmp_path)


def test_a_folder_that_is_not_called_as_torchtitan_calls_a_step(tmp_path: Path) -> None:
    save(tmp_path / "step-0099")
    save(tmp_path / "step-٣")
    assert find_checkpoints(tmp_path) == []


def test_whether_a_run_has_a_checkpoint(tmp_path: Path) -> None:
    assert not was_checkpointed(tmp_path)
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    assert not was_checkpointed(tmp_path)
    save(tmp_path / "other" / "step-5")
    assert was_checkpointed(tmp_path)


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save(tmp_path / f"step-{step}")
    os.truncate(data_file(tmp_path / "step-100"), 10)
    (tmp_path / "step-200").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "other").mkdir()
    found = find_checkpoints(tmp_path)
    assert [(c.step, c.complete, c.damaged) for c in found] == [
        (9, True, False),
        (10, True, False),
        (100, False, True),
        (200, False, False),
    ]
    assert latest(tmp_path).step == 10
    assert latest(tmp_path / "nowhere") is None
