"""The examples of the README do what it says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```\n", README.read_text(encoding="utf-8"), re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def python(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, encoding="utf-8").stdout


def test_logs_example(tmp_path, monkeypatch, capsys):
    from npu_debug.cli import main

    make, _ = blocks("python")
    command, _, expected = blocks("console")[0].partition("\n")
    assert command == "$ npu-debug logs run"
    python(make, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["logs", "run"]) == 1
    assert capsys.readouterr().out == expected


def test_nonfinite_example(tmp_path):
    pytest.importorskip("torch", reason="install npu-debug[torch] to run the tensor tests")
    _, find = blocks("python")
    (expected,) = blocks("text")
    assert python(find, tmp_path) == expected


def test_installed_command_is_the_one_described():
    command = shutil.which("npu-debug", path=str(Path(sys.executable).parent))
    assert command, "the console script npu-debug is not installed beside the interpreter"
    shown = subprocess.run([command, "--help"], check=True, capture_output=True, text=True).stdout
    assert "logs" in shown
