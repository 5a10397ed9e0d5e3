"""What must hold for every tracked file."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("npu-ops", "npu-parallel", "npu-train", "npu-debug")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_package_index_or_a_machine() -> None:
    # Written in pieces, so that this file does not name them either.
    hosts = ["pyp" + "i.org", "pythonhost" + "ed", "npm" + "js", "deb" + "ian.org"]
    paths = [re.escape("/" + name + "/") for name in ("wo" + "rk", "ro" + "ot")]
    pattern = re.compile("|".join([*map(re.escape, hosts), *(rf"(?<![\w.]){path}" for path in paths)]))
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert not found


def test_the_lock_files_name_no_host() -> None:
    for name in ("uv.lock", "wheelhouse/requirements.txt", "wheelhouse/requirements-npu.txt"):
        assert "://" not in (ROOT / name).read_text()


def test_versions_are_in_lockstep() -> None:
    projects = {name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text()) for name in PACKAGES}
    versions = {project["project"]["version"] for project in projects.values()}
    versions.add(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    assert len(versions) == 1
    (version,) = versions
    for name, project in projects.items():
        extras = project["project"].get("optional-dependencies", {})
        for requirement in [*project["project"]["dependencies"], *(r for extra in extras.values() for r in extra)]:
            if requirement.startswith("npu-"):
                assert requirement.endswith(f"=={version}"), f"{name}: {requirement}"


def test_torch_npu_is_never_a_default_dependency() -> None:
    for name in PACKAGES:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
        assert not any("torch_npu" in requirement for requirement in project["dependencies"])
        if name != "npu-debug":
            assert "torch_npu==2.14.0" in project["optional-dependencies"]["npu"]


def test_make_help_lists_every_task() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = set(re.findall(r"^  make ([\w-]+)", shown, re.M))
    tasks = "sync sync-sim lock train test integration lint docs docs-serve bench wheelhouse-bundle help"
    assert listed == set(tasks.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_is(package: str) -> None:
    folder = ROOT / "packages" / package
    assert (folder / "README.md").read_text().startswith(f"# {package}\n")
    assert list((folder / "tests").glob("test_*.py"))
    assert (folder / "src" / package.replace("-", "_") / "py.typed").is_file()


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.M)
