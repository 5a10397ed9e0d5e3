"""Builds the stand-ins for CANN's libraries that the installed torch_npu is loaded with.

The sources in `native/` are compiled once per machine and user, against the headers that torch_npu brings along, into
`libascendcl.so`, which holds every function. The other libraries that torch_npu is linked with are empty and lead to
it. Functions that are declared by those headers, or that torch_npu is linked with, and that no source defines are
generated: they fail with an error that names them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.util
import mmap
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from npu_debug.errors import InputError

TORCH_NPU_VERSION = "2.14.0"
NATIVE = Path(__file__).resolve().parent / "native"
# Read now: a process that is still running must not pass off its build as one by a source that was changed since.
_OWN_SOURCE = Path(__file__).read_bytes()
# In the order in which they are to be loaded: the first has every function, the others are empty and lead to it.
STAND_INS = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libhcomm.so",  # of newer CANN; torch_npu takes the functions that group calls of HCCL from it
)
FLAGS = ["-O2", "-fPIC", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-format-zero-length"]

# Functions that torch_npu looks up by name and honestly does without where they are missing, and what it does then. One
# that exists and fails would be an error instead. Where it would pretend success without a function (the repair of
# memory errors), the function exists and fails.
ABSENT = {
    "aclrtIpcGetEventHandle": "events cannot be shared between processes, so it synchronises before it shares memory",
    "aclrtIpcOpenEventHandle": "goes with aclrtIpcGetEventHandle",
    "aclrtMemcpyAsyncWithCondition": "copies of pageable memory are synchronous",
}

# ACL_ERROR_RT_INTERNAL_ERROR: where a function says "feature not supported", torch_npu may go on as if it had worked.
_NOT_IMPLEMENTED = 507000
_HCCL_E_NOT_SUPPORT = 5
_NAME = re.compile(r"(?:acl|Hccl|Msprof)[A-Za-z]\w*|rt[A-Z]\w*")


class SimError(InputError):
    """The simulated devices cannot be used on this machine; the message says what to do."""


def library_folder() -> Path:
    """The folder with the built libraries; builds them where that has not happened yet.

    The folder's name holds a hash of all that the libraries depend on, so that a changed source, torch_npu, torch or
    compiler leads to a new build. Several processes may ask at once. An existing build is found in some milliseconds;
    neither torch nor torch_npu is imported.

    Raises:
        SimError: torch_npu or a compiler is missing, torch_npu has another version, or the compiler fails.
    """
    torch_npu, torch = _package("torch_npu"), _package("torch")
    _check_version(torch_npu)
    compilers = {"c": find_compiler("c"), "c++": find_compiler("c++")}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu-debug"
    folder = cache / f"sim-{_fingerprint(torch_npu, torch, compilers)}"
    if _is_whole(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / "build.lock"):
            if not _is_whole(folder):
                if sys.stderr.isatty():
                    print("npu-debug sim: compiling the simulated devices, once, some seconds", file=sys.stderr)
                shutil.rmtree(folder, ignore_errors=True)
                _build_beside(folder, torch_npu, compilers)
    except OSError as error:
        raise SimError(
            f"The simulator's libraries cannot be written to {cache}: {error.strerror}. "
            "Set XDG_CACHE_HOME to a folder that is writable."
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("libkeys.so", *STAND_INS)) and (folder / "cann").is_dir()


def find_compiler(language: str) -> list[str]:
    """The command of the C ("c") or C++ ("c++") compiler: CC or CXX, else what the machine has.

    Raises:
        SimError: there is none.
    """
    variable, candidates = {"c": ("CC", ["cc", "gcc"]), "c++": ("CXX", ["c++", "g++"])}[language]
    try:
        wanted = shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise SimError(f"{variable}={os.environ[variable]} is not a command: {error}.") from None
    if wanted:
        if shutil.which(wanted[0]):
            return wanted
        raise SimError(
            f"{variable} names the compiler {wanted[0]!r}, which is not found: install it or unset {variable}."
        )
    for candidate in candidates:
        if shutil.which(candidate):
            return [candidate]
    raise SimError(
        f"Simulated devices need a {language.upper()} compiler, and neither {' nor '.join(candidates)} is found: "
        "install gcc and g++."
    )


def _package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SimError(
            f"Simulated devices run the real torch_npu, and {name} is not installed: "
            f'pip install "torch_npu=={TORCH_NPU_VERSION}" and keep TORCH_DEVICE_BACKEND_AUTOLOAD=0 set.'
        )
    return Path(spec.submodule_search_locations[0])


def _version(package: Path) -> str:
    try:
        found = re.search(r"__version__\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", (package / "version.py").read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _check_version(torch_npu: Path) -> None:
    version = _version(torch_npu)
    if version.partition("+")[0] != TORCH_NPU_VERSION:
        raise SimError(
            f"Simulated devices are made for torch_npu {TORCH_NPU_VERSION}, and version {version} is installed: "
            f'pip install "torch_npu=={TORCH_NPU_VERSION}" and keep TORCH_DEVICE_BACKEND_AUTOLOAD=0 set.'
        )


def _fingerprint(torch_npu: Path, torch: Path, compilers: dict[str, list[str]]) -> str:
    parts = [_version(torch_npu), _version(torch), repr(compilers)]
    for command in compilers.values():
        # Asking a compiler for its version takes as long as everything else here: its file stands for it.
        parts.append(_stamp(Path(shutil.which(command[0]) or command[0]).resolve()))
    for package in (torch_npu, torch):
        parts += [_stamp(library) for library in sorted((package / "lib").glob("*.so"))]
    digest = hashlib.sha256("\n".join(parts).encode())
    digest.update(_OWN_SOURCE)
    for source in sorted(NATIVE.iterdir()):
        if source.suffix in {".c", ".h", ".cpp"}:
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One builder at a time. Where a file system has none, several build and the later ones discard their result."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_beside(folder: Path, torch_npu: Path, compilers: dict[str, list[str]]) -> None:
    """Build into a temporary folder and rename it, so that nobody ever sees half a build."""
    for stopped in folder.parent.glob("building-*"):
        # Under the lock nobody else builds; a file system without locks keeps the young ones.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - stopped.stat().st_mtime > 600:
                shutil.rmtree(stopped, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        _build(temporary, torch_npu, compilers)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _build(out: Path, torch_npu: Path, compilers: dict[str, list[str]]) -> None:
    cc, cxx = compilers["c"], compilers["c++"]
    include = torch_npu / "include/third_party/acl/inc"
    compile_c = [*cc, "-std=gnu11", *FLAGS, *WARNINGS, "-isystem", str(include), f"-I{NATIVE}", "-c"]
    sources = sorted(NATIVE.glob("*.c"))
    objects = [out / f"{source.stem}.o" for source in sources]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(_run, [*compile_c, str(source), "-o", str(target)])
            for source, target in zip(sources, objects, strict=True)
        ]
        keys = [*cxx, *FLAGS, *WARNINGS, "-shared", str(NATIVE / "keys.cpp"), "-o", str(out / "libkeys.so"), "-ldl"]
        jobs.append(pool.submit(_run, keys))
        needed = needed_functions(torch_npu)
        for job in jobs:
            job.result()
    link = [*cc, "-shared", "-pthread", *map(str, objects), "-ldl", "-lm", "-lrt"]
    library = out / "libascendcl.so"
    _run([*link, "-o", str(library)])
    defined, _ = dynamic_symbols(library)
    stubs = out / "stubs.c"
    stubs.write_text(stub_source(sorted(needed.keys() - defined - ABSENT.keys()), needed))
    _run([*compile_c, str(stubs), "-o", str(out / "stubs.o")])
    _run([*link, str(out / "stubs.o"), "-Wl,-soname,libascendcl.so", "-Wl,-z,defs", "-o", str(library)])
    empty = [
        *cc,
        "-shared",
        "-x",
        "c",
        "/dev/null",
        "-Wl,--no-as-needed",
        f"-L{out}",
        "-lascendcl",
        "-Wl,-rpath,$ORIGIN",
    ]
    for name in STAND_INS[1:]:
        _run([*empty, "-o", str(out / name), f"-Wl,-soname,{name}"])
    for intermediate in [*objects, out / "stubs.o"]:
        intermediate.unlink()
    # torch_npu looks for CANN's folders, and warns on every start where there are none. These are empty.
    for part in ("runtime", "compiler", "opp"):
        (out / "cann" / part).mkdir(parents=True)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = "\n".join(result.stderr.strip().splitlines()[:20]) or f"It ended with {result.returncode}."
        raise SimError(f"Building the simulator's libraries failed: {shlex.join(command)}\n{reason}")


def needed_functions(torch_npu: Path) -> dict[str, str]:
    """The C functions of CANN that torch_npu may call, with the text that its headers have before each name.

    They are the functions that its libraries are linked with and those that its headers declare: it looks up by name
    what an older CANN may lack, and a name that is too much hurts nobody.
    """
    declared: dict[str, str] = {}
    third_party = torch_npu / "include/third_party"
    for folder in ("acl/inc/acl", "acl/inc/profiling", "hccl/inc/hccl"):
        for header in sorted((third_party / folder).glob("*.h")):
            text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header.read_text(errors="replace"), flags=re.DOTALL)
            for found in re.finditer(r"([\w \t\n*]*?)\b((?:acl|Hccl|Msprof|rt)\w+)\s*\(", text):
                # A name without a type before it is a call or, as in "typedef aclError (*f)(...)", a type itself.
                if _NAME.fullmatch(found[2]) and found[1].split()[-1:] not in ([], ["typedef"], ["return"]):
                    declared.setdefault(found[2], found[1])
    linked: set[str] = set()
    own: set[str] = set()
    for library in [*(torch_npu / "lib").glob("*.so"), *torch_npu.glob("_C*.so")]:
        defined, undefined = dynamic_symbols(library)
        own |= defined
        linked |= {name for name in undefined if _NAME.fullmatch(name)}
    return {name: declared.get(name, "") for name in (linked | declared.keys()) - own}


def stub_source(names: list[str], declared: dict[str, str]) -> str:
    """C source of functions that fail and name themselves."""
    # Without the headers, whose declarations these would contradict: a caller's arguments are not looked at.
    lines = ["int sim_not_implemented(const char *name, int code);", ""]
    lines += ['#define STUB(name, error, result) __attribute__((visibility("default"))) long name(void); \\']
    lines += ["    long name(void) { int code = sim_not_implemented(#name, error); (void)code; return result; }", ""]
    for name in names:
        before = declared[name]
        if "float" in before:  # its result would be whatever a register holds: better that the name is not found
            continue
        # A pointer or a number that is no error code says "nothing" by 0.
        is_code = not before.strip() or re.search(r"\b(aclError|HcclResult|int|int32_t)\s*$", before)
        error = _HCCL_E_NOT_SUPPORT if name.startswith("Hccl") else _NOT_IMPLEMENTED
        lines.append(f"STUB({name}, {error}, {'code' if is_code else '0'})")
    return "\n".join(lines) + "\n"


def dynamic_symbols(path: Path) -> tuple[set[str], set[str]]:
    """Names that a 64-bit little-endian ELF library defines and names that it needs, from its dynamic symbol table."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise SimError(f"{path} is not a 64-bit ELF library.")
        table, size, count = struct.unpack_from("<Q10xHH", data, 0x28)[0], *struct.unpack_from("<HH", data, 0x3A)
        # Of a section header: name, type, flags, address, offset, size, link, info, alignment, size of an entry.
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + index * size) for index in range(count)]
        defined: set[str] = set()
        undefined: set[str] = set()
        for section in sections:
            if section[1] != 11:  # SHT_DYNSYM
                continue
            strings = sections[section[6]]
            names = data[strings[4] : strings[4] + strings[5]]
            for name, _info, _other, where, _value, _size in struct.iter_unpack(
                "<IBBHQQ", data[section[4] : section[4] + section[5]]
            ):
                target = undefined if where == 0 else defined
                target.add(names[name : names.index(b"\0", name)].decode())
        return defined, undefined
