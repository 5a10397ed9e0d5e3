"""Building the simulator's libraries: what is compiled, when, and what is said where that is impossible."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from npu_debug.simulation import build


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return build.library_folder()
    except build.SimError as error:
        pytest.skip(f"needs a C and a C++ compiler and torch_npu {build.TORCH_NPU_VERSION}: {error}")


def test_an_existing_build_is_found_quickly_and_without_torch(folder: Path) -> None:
    program = """
import sys, time
from npu_debug.simulation import build
best = 1
for _ in range(5):
    start = time.perf_counter()
    folder = build.library_folder()
    best = min(best, time.perf_counter() - start)
print(folder, best, any(name.split(".")[0] in ("torch", "torch_npu") for name in sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found, seconds, imported = result.stdout.rsplit(maxsplit=2)
    assert (found, imported) == (str(folder), "False")
    assert float(seconds) < 0.02


def test_the_libraries_lead_to_the_one_with_the_functions(folder: Path) -> None:
    defined, undefined = build.dynamic_symbols(folder / "libascendcl.so")
    assert {"aclInit", "aclrtMalloc", "sim_pending_tasks", "sim_stream_wait"} <= defined
    assert not {name for name in undefined if name.startswith(("acl", "Hccl", "sim_"))}
    for name in build.STAND_INS[1:]:
        program = f"import ctypes; ctypes.CDLL({str(folder / name)!r}).aclrtGetSocName"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_function_of_the_headers_exists_unless_it_is_listed(folder: Path) -> None:
    defined, _ = build.dynamic_symbols(folder / "libascendcl.so")
    needed = build.needed_functions(build._package("torch_npu"))
    missing = {name for name, before in needed.items() if name not in defined and "float" not in before}
    assert missing <= build.ABSENT.keys()
    assert build.ABSENT.keys().isdisjoint(defined)
    assert {"aclInit", "aclrtGetMemInfo", "MsprofReportApi", "HcclAllReduce", "rtKernelLaunch"} <= needed.keys()


def test_symbols_agree_with_the_binutils(folder: Path) -> None:
    try:
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", folder / "libascendcl.so"], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("needs nm (binutils) as the second opinion")
    assert build.dynamic_symbols(folder / "libascendcl.so")[0] == {
        line.split()[-1] for line in listing.stdout.splitlines()
    }


def test_the_sources_compile_without_warnings(folder: Path) -> None:
    include = build._package("torch_npu") / "include/third_party/acl/inc"
    command = [*build.find_compiler("c"), "-std=gnu11", "-fsyntax-only", "-Werror", *build.WARNINGS]
    for source in sorted(build.NATIVE.glob("*.c")):
        subprocess.run([*command, "-isystem", include, f"-I{build.NATIVE}", source], check=True, timeout=60)


def test_several_processes_build_once(folder: Path, tmp_path: Path) -> None:
    # A damaged build, and one that was interrupted long ago, are cleared away.
    damaged, stopped = tmp_path / "npu-debug" / folder.name, tmp_path / "npu-debug" / "building-old"
    damaged.mkdir(parents=True)
    (damaged / "libascendcl.so").touch()
    stopped.mkdir()
    os.utime(stopped, (0, 0))
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    program = "from npu_debug.simulation import build; print(build.library_folder())"

    def start(_: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        results = set(pool.map(start, range(3)))
    assert results == {str(tmp_path / "npu-debug" / folder.name)}
    assert sorted(path.name for path in (tmp_path / "npu-debug").iterdir()) == ["build.lock", folder.name]
    ctypes.CDLL(str(tmp_path / "npu-debug" / folder.name / "libkeys.so"))


def test_clearing_keys_does_nothing_without_torch(folder: Path) -> None:
    assert ctypes.CDLL(str(folder / "libkeys.so")).clear_keys() >= 0


@pytest.mark.parametrize(("language", "variable", "said"), [("c", "CC", "CC names"), ("c++", "CXX", "CXX names")])
def test_a_missing_compiler_is_named(language: str, variable: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "no-such-compiler -m64")
    with pytest.raises(build.SimError, match=f"{said} the compiler 'no-such-compiler'"):
        build.find_compiler(language)
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.SimError, match=r"install gcc and g\+\+"):
        build.find_compiler(language)


@pytest.mark.parametrize(
    ("version", "said"), [(None, "torch_npu is not installed"), ("2.13.0", "version 2.13.0 is installed")]
)
def test_another_torch_npu_is_refused(
    version: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> object:
        if name == "torch_npu" and version is None:
            return None
        return type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})

    if version:
        (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    monkeypatch.setattr(build.importlib.util, "find_spec", find_spec)
    with pytest.raises(build.SimError, match=said) as caught:
        build.library_folder()
    assert 'pip install "torch_npu==2.14.0"' in str(caught.value)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in str(caught.value)


def test_a_cache_that_is_not_writable_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(build.SimError, match="Set XDG_CACHE_HOME"):
        build.library_folder()


def test_a_variable_that_is_no_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(build.SimError, match=r"CC=gcc .* is not a command"):
        build.find_compiler("c")


def test_what_the_compiler_says_is_passed_on() -> None:
    with pytest.raises(build.SimError, match=r"missing\.c"):
        build._run([*build.find_compiler("c"), "-c", "missing.c", "-o", os.devnull])
