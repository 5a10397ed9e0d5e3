"""Each package's wheel, built and installed alone with only what it declares."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("npu-ops", "npu-parallel", "npu-train", "npu-debug")
# What may be there besides the package, and what must not.
DECLARED = {
    "npu-ops": ({"torch"}, {"torchtitan", "npu-parallel", "npu-train", "npu-debug", "torch-npu", "matplotlib"}),
    "npu-parallel": ({"torch", "npu-ops"}, {"torchtitan", "npu-train", "npu-debug", "torch-npu", "matplotlib"}),
    "npu-train": ({"torch", "torchtitan", "npu-ops", "npu-parallel", "npu-debug", "matplotlib"}, {"torch-npu"}),
    "npu-debug": (set(), {"torch", "numpy", "matplotlib", "torchtitan", "npu-ops", "npu-parallel", "npu-train"}),
}
USE = {
    "npu-ops": "import torch, npu_ops; q = torch.ones(1, 4, 2, 8); print(npu_ops.masked_attention(q, q, q).shape)",
    "npu-parallel": "from npu_parallel.layout import legal_layouts; import npu_parallel.gloo; print(legal_layouts(2))",
    "npu-train": "from npu_train.device import select_device; select_device('cpu'); import npu_train.configs as c; "
    "print(c.parse('npu_train.recipe_configs', 'quickstart', [], 'cpu').training.steps)",
    "npu-debug": "import npu_debug.logs, npu_debug.cli; print(npu_debug.__version__)",
}


def uv() -> str:
    found = shutil.which("uv") or next(
        (
            str(path)
            for path in Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").glob(
                "torchtitan-ascend/uv-*/bin/uv"
            )
        ),
        None,
    )
    if found is None:
        pytest.fail("uv is not there: run make sync")
    return found


def call(*arguments: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        arguments, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call(uv(), "build", "--quiet", "--wheel", "--offline", "--all-packages", "--out-dir", str(folder), cwd=ROOT)
    return folder


def test_versions_are_in_lockstep(wheels: Path) -> None:
    built = sorted(path.name.split("-")[:2] for path in wheels.glob("*.whl"))
    assert [name for name, _ in built] == sorted(package.replace("-", "_") for package in PACKAGES)
    assert len({version for _, version in built}) == 1


def test_npu_train_ships_its_data(wheels: Path) -> None:
    (wheel,) = wheels.glob("npu_train-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("corpus.jsonl", "validation.jsonl", "PROVENANCE.md", "tokenizer/tokenizer.json"):
        assert f"npu_train/assets/quickstart/{name}" in names


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_alone(wheels: Path, tmp_path: Path, package: str) -> None:
    environment = tmp_path / "env"
    call(uv(), "venv", "--quiet", "--python", sys.executable, str(environment), cwd=tmp_path)
    python = str(environment / "bin" / "python")
    links = ["--find-links", str(wheels), "--find-links", str(ROOT / "wheelhouse" / "wheels")]
    call(
        uv(), "pip", "install", "--quiet", "--offline", "--no-index", *links, "--python", python, package, cwd=tmp_path
    )
    listed = call(uv(), "pip", "list", "--quiet", "--format", "freeze", "--python", python, cwd=tmp_path)
    installed = {line.split("==")[0].lower() for line in listed.splitlines()}
    present, absent = DECLARED[package]
    assert {package, *present} <= installed
    assert not absent & installed
    marker = f"import importlib.resources as r; print((r.files('{package.replace('-', '_')}') / 'py.typed').is_file())"
    used = call(python, "-c", f"{USE[package]}\n{marker}", cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    *printed, marked = used.splitlines()
    assert "".join(printed).strip()
    assert marked == "True"
