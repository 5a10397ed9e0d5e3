"""HCCL of the simulated devices: several processes call the built library as torch_npu does.

Expected values are computed here in plain Python. Each test forks one process per rank; a rank that fails says why.
"""

import ctypes
import importlib.util
import json
import math
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

import pytest

from npu_debug.simulation import build, hook

# The numbers of HcclDataType with the bytes of an element.
TYPES = {
    "int8": (0, 1),
    "int16": (1, 2),
    "int32": (2, 4),
    "fp16": (3, 2),
    "fp32": (4, 4),
    "int64": (5, 8),
    "uint64": (6, 8),
    "uint8": (7, 1),
    "uint16": (8, 2),
    "uint32": (9, 4),
    "fp64": (10, 8),
    "bfp16": (11, 2),
    "int128": (12, 16),
    "hif8": (14, 1),
    "fp8e4m3": (15, 1),
    "fp8e5m2": (16, 1),
    "fp8e8m0": (17, 1),
}
SUM, PROD, MAX, MIN = range(4)
PTR, NOT_SUPPORT, PARA, TIMEOUT, OPEN_FILE_FAILURE, REMOTE = 2, 5, 1, 9, 10, 21
TIMED_OUT = 507048  # ACL_ERROR_RT_FFTS_PLUS_TIMEOUT: what a 910B reports for a collective that hangs
SEVERAL_CHUNKS = 1_300_003  # bytes: three chunks of 512 KiB, the last one odd
ROOT_INFO_BYTES = 4108


@pytest.fixture(scope="module")
def libraries() -> Path:
    """Folder of the built libraries; skips where they cannot be built."""
    if sys.platform != "linux":
        pytest.skip("simulated devices need Linux")
    if hook.active():
        pytest.skip("this process has simulated devices of its own already: run these tests with -m 'not sim'")
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu, whose headers the simulated device is built with, is not installed")
    for language in ("c", "c++"):
        try:
            build.find_compiler(language)
        except build.SimError as error:
            pytest.skip(str(error))
    return build.library_folder()


@pytest.fixture
def job(libraries, tmp_path) -> Iterator["Job"]:
    """Starts jobs, and leaves none of their processes behind."""
    starter = Job(libraries, tmp_path)
    yield starter
    starter.end()


class Rank:
    """One rank inside its own process: the library, a stream and the communicator of the job."""

    def __init__(self, folder: Path, rank: int, ranks: int, shared: mmap.mmap) -> None:
        self.acl = ctypes.CDLL(str(folder / "libascendcl.so"), ctypes.RTLD_GLOBAL)
        self.hccl = ctypes.CDLL(str(folder / "libhccl.so"))
        self.acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.hccl.HcclGetErrorString.restype = ctypes.c_char_p
        self.rank, self.ranks, self.shared = rank, ranks, shared
        self.comm = c_void_p()
        assert self.acl.aclInit(None) == 0
        assert self.acl.aclrtSetDevice(rank) == 0
        self.stream = self.new_stream()

    def new_stream(self) -> c_void_p:
        stream = c_void_p()
        assert self.acl.aclrtCreateStream(ctypes.byref(stream)) == 0
        return stream

    def message(self) -> str:
        """Why this thread's last call failed; asking takes it."""
        return (self.acl.aclGetRecentErrMsg() or b"").decode()

    def call(self, name: str, *arguments: object) -> None:
        """Call and expect success."""
        code = getattr(self.hccl, name)(*arguments)
        assert code == 0, f"{name}: {code}, {self.message()}"

    def run(self, name: str, *arguments: object, comm: c_void_p | None = None) -> None:
        """Call an operation on the job's stream and wait for it."""
        self.call(name, *arguments, comm or self.comm, self.stream)
        self.wait()

    def wait(self, expected: int = 0) -> str:
        code = self.acl.aclrtSynchronizeStream(self.stream)
        message = self.message() if code else ""
        assert code == expected, f"stream: {code}, {message}"
        return message

    def root_info(self) -> ctypes.Array:
        """The root info of rank 0, passed on through memory of the test's own."""
        info = ctypes.create_string_buffer(ROOT_INFO_BYTES)
        if self.rank == 0:
            self.call("HcclGetRootInfo", info)
            self.shared[1 : 1 + ROOT_INFO_BYTES] = info.raw
            self.shared[0] = 1
        while not self.shared[0]:
            time.sleep(0.001)
        info.raw = self.shared[1 : 1 + ROOT_INFO_BYTES]
        return info

    def init(self) -> None:
        self.call("HcclCommInitRootInfo", c_uint32(self.ranks), self.root_info(), c_uint32(self.rank), self.byref())

    def byref(self) -> object:
        return ctypes.byref(self.comm)

    def sub(self, members: list[int], identity: int) -> c_void_p:
        comm = c_void_p()
        ids = (c_uint32 * len(members))(*members)
        who = (c_uint32(len(members)), ids, c_uint64(identity), c_uint32(members.index(self.rank)))
        self.call("HcclCreateSubCommConfig", self.byref(), *who, None, ctypes.byref(comm))
        return comm

    def async_error(self) -> int:
        error = c_int()
        self.call("HcclGetCommAsyncError", self.comm, ctypes.byref(error))
        return error.value

    def name(self, comm: c_void_p) -> str:
        name = ctypes.create_string_buffer(128)
        self.call("HcclGetCommName", comm, name)
        return name.value.decode()

    def meet(self, place: int) -> None:
        """Wait for the other ranks without the library."""
        base = 8000 + place * 16
        self.shared[base + self.rank] = 1
        deadline = time.monotonic() + 10
        while not all(self.shared[base : base + self.ranks]):
            assert time.monotonic() < deadline, "another rank has failed"
            time.sleep(0.001)


Program = Callable[[Rank], None]


class Job:
    """Runs a program on several ranks, each a forked process."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.folder, self.tmp_path, self.processes = folder, tmp_path, dict[int, int]()

    def start(self, ranks: int, program: Program, init: bool = True, **environment: str) -> None:
        shared = mmap.mmap(-1, 16384)
        for rank in range(ranks):
            process = os.fork()
            if process == 0:
                status = 1
                try:
                    output = os.open(self.tmp_path / f"{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                    os.dup2(output, 2)
                    os.environ.update(environment)
                    me = Rank(self.folder, rank, ranks, shared)
                    if init:
                        me.init()
                    program(me)
                    status = 0
                except BaseException:
                    os.write(2, traceback.format_exc().encode())
                finally:
                    os._exit(status)
            self.processes[process] = rank

    def finish(self, seconds: float = 60.0) -> dict[int, int]:
        """Wait for the processes; their exit codes by rank."""
        deadline, codes = time.monotonic() + seconds, dict[int, int]()
        while self.processes and time.monotonic() < deadline:
            for process, rank in list(self.processes.items()):
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    del self.processes[process]
            time.sleep(0.002)
        late = sorted(self.processes.values())
        assert not late, f"ranks {late} still run after {seconds} s\n{self.output()}"
        return codes

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.tmp_path.glob("*.txt")))

    def __call__(self, ranks: int, program: Program, init: bool = True, **environment: str) -> str:
        """Run to the end; every rank must succeed. Returns what the ranks wrote to stderr."""
        self.start(ranks, program, init, **environment)
        codes = self.finish()
        assert codes == dict.fromkeys(range(ranks), 0), self.output()
        return self.output()

    def end(self) -> None:
        for process in self.processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def pattern(seed: int, size: int) -> bytes:
    """Bytes that differ between seeds, with a period of 251, which divides no chunk."""
    return bytes((seed * 37 + i * 7) % 256 for i in range(251)) * (size // 251 + 1)


def piece(seed: int, size: int, start: int = 0) -> bytes:
    return pattern(seed, start + size)[start : start + size]


def buffer(data: bytes) -> ctypes.Array:
    """Memory of its own with the data; never empty, so that its address is real."""
    return (ctypes.c_char * max(len(data), 1)).from_buffer_copy(data or b"?")


def read(memory: ctypes.Array, size: int) -> bytes:
    return bytes(memory.raw[:size])


def check(memory: ctypes.Array, expected: bytes, what: object) -> None:
    actual = read(memory, len(expected))
    if actual != expected:
        first = next(i for i in range(len(expected)) if actual[i] != expected[i])
        raise AssertionError(f"{what}: byte {first} of {len(expected)} is {actual[first]}, not {expected[first]}")


def at(memory: ctypes.Array, offset: int) -> c_void_p:
    return c_void_p(ctypes.addressof(memory) + offset)


def u64(values: list[int]) -> ctypes.Array:
    return (c_uint64 * len(values))(*values)


def wrapped_sum(seeds: range, size: int) -> bytes:
    return bytes(sum(pattern(seed, 251)[i] for seed in seeds) % 256 for i in range(251)) * (size // 251 + 1)


U8 = c_int(TYPES["uint8"][0])
SIZES = (0, 1, 4099, SEVERAL_CHUNKS)


def collectives(me: Rank) -> None:
    n, rank = me.ranks, me.rank
    for size in SIZES:
        count, total = c_uint64(size), wrapped_sum(range(n), n * size)
        mine, everything = piece(rank, size), b"".join(piece(r, size) for r in range(n))

        recv = buffer(bytes(size))
        me.run("HcclAllReduce", buffer(mine), recv, count, U8, SUM)
        check(recv, total[:size], ("all-reduce", size))
        recv = buffer(mine)
        me.run("HcclAllReduce", recv, recv, count, U8, SUM)
        check(recv, total[:size], ("all-reduce in place", size))

        recv = buffer(bytes(n * size))
        me.run("HcclAllGather", buffer(mine), recv, count, U8)
        check(recv, everything, ("all-gather", size))
        recv = buffer(bytes(rank * size) + mine + bytes((n - rank - 1) * size))
        me.run("HcclAllGather", at(recv, rank * size), recv, count, U8)
        check(recv, everything, ("all-gather in place", size))

        whole = piece(rank, n * size)
        recv = buffer(bytes(size))
        me.run("HcclReduceScatter", buffer(whole), recv, count, U8, SUM)
        check(recv, total[rank * size : (rank + 1) * size], ("reduce-scatter", size))
        for offset in (0, rank * size):
            recv = buffer(whole)
            me.run("HcclReduceScatter", recv, at(recv, offset), count, U8, SUM)
            result = buffer(read(recv, n * size)[offset:])
            check(result, total[rank * size : (rank + 1) * size], ("reduce-scatter in place", size, offset))

        recv = buffer(bytes(n * size))
        me.run("HcclAlltoAll", buffer(whole), count, U8, recv, count, U8)
        expected = b"".join(piece(r, size, rank * size) for r in range(n))
        check(recv, expected, ("all-to-all", size))
        recv = buffer(whole)
        me.run("HcclAlltoAll", recv, count, U8, recv, count, U8)
        check(recv, expected, ("all-to-all in place", size))

        for root in {0, n - 1}:
            recv = buffer(mine)
            me.run("HcclBroadcast", recv, count, U8, root)
            check(recv, piece(root, size), ("broadcast", size, root))
            recv = buffer(bytes(size))
            me.run("HcclReduce", buffer(mine), recv, count, U8, SUM, root)
            check(recv, total[:size] if rank == root else bytes(size), ("reduce", size, root))
            recv = buffer(bytes(size))
            me.run("HcclScatter", buffer(whole) if rank == root else None, recv, count, U8, root)
            check(recv, piece(root, size, rank * size), ("scatter", size, root))
    me.run("HcclBarrier")
    me.call("HcclCommDestroy", me.comm)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives(job, ranks):
    assert job(ranks, collectives) == ""


def test_one_rank(job):
    job(1, collectives)


def uneven(me: Rank) -> None:
    n, rank, (number, width) = me.ranks, me.rank, TYPES["int32"]
    for scale in (1, 70_001):
        counts = [(r * 2 % 3) * scale for r in range(n)]  # the first rank has none
        starts = [sum(counts[:r]) + r for r in range(n)]  # a gap before each
        size = (starts[-1] + counts[-1]) * width
        expected = bytearray(size)
        for r in range(n):
            expected[starts[r] * width : (starts[r] + counts[r]) * width] = piece(r, counts[r] * width)
        recv = buffer(bytes(size))
        send = buffer(piece(rank, counts[rank] * width))
        me.run("HcclAllGatherV", send, c_uint64(counts[rank]), recv, u64(counts), u64(starts), c_int(number))
        check(recv, bytes(expected), ("all-gather-v", scale))

        counts8, starts8 = [c * width for c in counts], [s * width for s in starts]
        recv = buffer(bytes(counts8[rank]))
        send = buffer(piece(rank, size))
        me.run("HcclReduceScatterV", send, u64(counts8), u64(starts8), recv, c_uint64(counts8[rank]), U8, SUM)
        begin = starts8[rank]
        check(recv, wrapped_sum(range(n), size)[begin : begin + counts8[rank]], ("reduce-scatter-v", scale))

        # What goes from i to j, in elements.
        matrix = [[((3 * i + j) % 4) * scale for j in range(n)] for i in range(n)]
        column = [matrix[r][rank] for r in range(n)]
        sent = [sum(matrix[rank][:j]) + j for j in range(n)]
        taken = [sum(column[:i]) + 2 * i for i in range(n)]
        send = buffer(piece(rank, (sum(matrix[rank]) + n) * width))
        recv = buffer(bytes((sum(column) + 2 * n) * width))
        kind = c_int(number)
        me.run("HcclAlltoAllV", send, u64(matrix[rank]), u64(sent), kind, recv, u64(column), u64(taken), kind)
        expected = bytearray((sum(column) + 2 * n) * width)
        for i in range(n):
            source = (sum(matrix[i][:rank]) + rank) * width
            expected[taken[i] * width : (taken[i] + column[i]) * width] = piece(i, column[i] * width, source)
        check(recv, bytes(expected), ("all-to-all-v", scale))

        send = buffer(piece(rank, sum(matrix[rank]) * width))
        recv = buffer(bytes(sum(column) * width))
        me.run("HcclAlltoAllVC", send, u64([count for row in matrix for count in row]), kind, recv, kind)
        expected = b"".join(piece(i, column[i] * width, sum(matrix[i][:rank]) * width) for i in range(n))
        check(recv, expected, ("all-to-all-vc", scale))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_uneven_counts(job, ranks):
    job(ranks, uneven)


def every_type(me: Rank) -> None:
    for name, (number, width) in TYPES.items():
        size, kind, count = 37 * width, c_int(number), c_uint64(37)
        recv = buffer(bytes(me.ranks * size))
        me.run("HcclAllGather", buffer(piece(me.rank, size)), recv, count, kind)
        check(recv, b"".join(piece(r, size) for r in range(me.ranks)), name)
        recv = buffer(piece(me.rank, size))
        me.run("HcclBroadcast", recv, count, kind, 1)
        check(recv, piece(1, size), name)
        recv = buffer(piece(me.rank, me.ranks * size))
        me.run("HcclAlltoAll", recv, count, kind, recv, count, kind)
        check(recv, b"".join(piece(r, size, me.rank * size) for r in range(me.ranks)), name)
        operation, peer = ("HcclSend", 1) if me.rank == 0 else ("HcclRecv", 0)
        memory = buffer(piece(me.rank, size))
        me.run(operation, memory, count, kind, peer)
        check(memory, piece(0, size), name)


def test_every_data_type_is_moved(job):
    job(2, every_type)


CODES = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I"}
CODES |= {"uint64": "Q", "fp16": "e", "fp32": "f", "fp64": "d"}


def fp32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def bfp16_bits(value: float) -> int:
    """Round float32 to bfloat16, nearest, ties to even; by comparing with both neighbours."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low, rest = bits >> 16, bits & 0xFFFF
    if math.isnan(value):
        return low | 0x40
    return low + (rest > 0x8000 or (rest == 0x8000 and low % 2 == 1))


def unpack(kind: str, data: bytes) -> list:
    if kind == "bfp16":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    return list(struct.unpack(f"<{len(data) // TYPES[kind][1]}{CODES[kind]}", data))


def pack(kind: str, values: list) -> bytes:
    if kind == "bfp16":
        return b"".join(struct.pack("<H", bfp16_bits(value)) for value in values)
    packed = b""
    for value in values:
        try:
            packed += struct.pack("<" + CODES[kind], value)
        except OverflowError:  # a float32 that a half cannot hold
            packed += struct.pack("<" + CODES[kind], math.copysign(math.inf, value))
    return packed


def inputs(kind: str, rank: int) -> bytes:
    """Values that tell right from nearly right: wrap, rounding ties, subnormals, infinities, NaN."""
    width = TYPES[kind][1]
    if "fp" not in kind:
        top = 2 ** (8 * width - 1) - 1 if kind[0] == "i" else 2 ** (8 * width) - 1
        low = -top - 1 if kind[0] == "i" else 0
        return pack(kind, [rank + 1, top - rank, low + rank, (rank * 77 + 5) % 100, top // 2 + rank, *range(20)])
    by_rank = [
        [1.0, 3.0, math.nan, math.inf, 5e-8, 100.0, 1e30, -0.0, 2048.0, 0.1],
        [2.0**-9, -7.0, 1.0, -math.inf, 6e-8, math.nan, 1e30, -0.0, 1.0, 0.2],
        [2.0**-9, 2.5, 2.0, 1.0, 7e-8, 300.0, -1e30, -0.0, 1.0, 0.3],
    ]
    values = by_rank[rank] + [((rank + 1) * 0.37 * i) % 3.0 - 1.0 for i in range(400)]
    if kind == "fp16":
        values[6] = (60000.0, 60000.0, -60000.0)[rank]
    return pack(kind, [fp32(v) for v in values] if kind != "fp64" else values)


def combine(kind: str, op: int, parts: list[bytes]) -> bytes:
    """The expected result: in rank order, halves in float32 with one rounding at the end."""
    results = []
    for values in zip(*(unpack(kind, part) for part in parts), strict=True):
        total = values[0]
        for value in values[1:]:
            if op in (MAX, MIN):
                nan = "fp" in kind and (math.isnan(total) or math.isnan(value))
                total = math.nan if nan else max(total, value) if op == MAX else min(total, value)
                continue
            total = total + value if op == SUM else total * value
            if "fp" not in kind:
                bits = 8 * TYPES[kind][1]
                total %= 2**bits
                if kind[0] == "i" and total >= 2 ** (bits - 1):
                    total -= 2**bits
            elif kind != "fp64":
                total = fp32(total)
        results.append(total)
    return pack(kind, results)


def differences(kind: str, actual: bytes, expected: bytes) -> list[tuple]:
    """Elements that differ in value or sign; one NaN is like another."""
    pairs = zip(unpack(kind, actual), unpack(kind, expected), strict=True)
    return [(i, a, e) for i, (a, e) in enumerate(pairs) if repr(a) != repr(e)]


def reductions(me: Rank) -> None:
    for kind in [*CODES, "bfp16"]:
        number, width = TYPES[kind]
        parts = [inputs(kind, r) for r in range(me.ranks)]
        for op in (SUM, PROD, MAX, MIN):
            expected = combine(kind, op, parts)
            for times in (1, 30):  # small, and large enough to be shared out among the ranks
                count = len(parts[0]) // width * times
                recv = buffer(bytes(count * width))
                send = buffer(parts[me.rank] * times)
                me.run("HcclAllReduce", send, recv, c_uint64(count), c_int(number), op)
                assert not differences(kind, read(recv, count * width), expected * times), (kind, op, times)
                raw = (ctypes.c_char * (me.ranks * count * width))()
                me.run("HcclAllGather", recv, raw, c_uint64(count * width), U8)
                assert raw.raw == read(recv, count * width) * me.ranks, f"{kind}, {op}: the ranks have different bits"
            per_rank = len(parts[0]) // width // me.ranks
            recv = buffer(bytes(per_rank * width))
            me.run("HcclReduceScatter", buffer(parts[me.rank]), recv, c_uint64(per_rank), c_int(number), op)
            mine = expected[me.rank * per_rank * width : (me.rank + 1) * per_rank * width]
            assert not differences(kind, read(recv, per_rank * width), mine), (kind, op)
    memory = buffer(bytes(64))
    for kind in ("int128", "hif8", "fp8e4m3"):
        arguments = (memory, memory, c_uint64(1), c_int(TYPES[kind][0]), SUM, me.comm, me.stream)
        assert me.hccl.HcclAllReduce(*arguments) == NOT_SUPPORT
        message = me.message()
        assert all(part in message for part in ("HcclAllReduce", "sum", kind)), message
    arguments = (memory, memory, c_uint64(1), c_int(TYPES["fp32"][0]), 4, me.comm, me.stream)
    assert me.hccl.HcclAllReduce(*arguments) == NOT_SUPPORT


def test_reductions(job):
    job(3, reductions)


def every_half(me: Rank) -> None:
    """Adding -0 gives each half back."""
    bits = struct.pack("<65536H", *range(65536))
    other = bits if me.rank == 0 else struct.pack("<e", -0.0) * 65536
    for kind in ("fp16", "bfp16"):
        recv = buffer(bytes(len(bits)))
        me.run("HcclAllReduce", buffer(other), recv, c_uint64(65536), c_int(TYPES[kind][0]), SUM)
        assert not differences(kind, read(recv, len(bits)), bits), kind


def test_every_half_survives_conversion(job):
    job(2, every_half)


def sub_communicators(me: Rank) -> None:
    def total(comm: c_void_p, members: list[int]) -> None:
        recv = buffer(piece(me.rank, 5000))
        me.run("HcclAllReduce", recv, recv, c_uint64(5000), U8, SUM, comm=comm)
        expected = bytes(sum(column) % 256 for column in zip(*(piece(r, 5000) for r in members), strict=True))
        check(recv, expected, members)

    pair = [[0, 2], [1, 3]][me.rank % 2]
    first = me.sub(pair, 7)
    total(first, pair)
    for _ in range(3):  # the same members under the same id, while the earlier ones live
        total(me.sub(pair, 7), pair)
    everyone = [2, 0, 3, 1]
    turned = me.sub(everyone, 8)
    number, rank = c_uint32(), c_uint32()
    me.call("HcclGetRankSize", turned, ctypes.byref(number))
    me.call("HcclGetRankId", turned, ctypes.byref(rank))
    assert (number.value, rank.value) == (4, everyone.index(me.rank))
    recv = buffer(bytes(4))
    me.run("HcclAllGather", buffer(bytes([me.rank])), recv, c_uint64(1), U8, comm=turned)
    assert read(recv, 4) == bytes(everyone)
    total(me.comm, everyone)
    if me.rank < 2:
        nested = c_void_p()
        inner = (c_uint32 * 2)(everyone.index(0), everyone.index(1))
        position = c_uint32(me.rank)
        call = (ctypes.byref(turned), c_uint32(2), inner, c_uint64(9), position, None, ctypes.byref(nested))
        me.call("HcclCreateSubCommConfig", *call)
        total(nested, [0, 1])
    me.call("HcclCommDestroy", first)
    assert me.name(turned) != me.name(me.comm)
    none = c_void_p(1)
    outside = (me.byref(), c_uint32(0), None, c_uint64(0xFFFFFFFF), c_uint32(0), None, ctypes.byref(none))
    me.call("HcclCreateSubCommConfig", *outside)
    assert none.value is None


def test_sub_communicators(job):
    job(4, sub_communicators)


class Item(ctypes.Structure):
    """HcclSendRecvItem."""

    _fields_ = (("kind", c_int), ("buffer", c_void_p), ("count", c_uint64), ("type", c_int), ("peer", c_uint32))


def point_to_point(me: Rank) -> None:
    n, rank = me.ranks, me.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    for size in SIZES:
        send, recv = buffer(piece(rank, size)), buffer(bytes(size))
        steps = [("HcclSend", send, after), ("HcclRecv", recv, before)]
        for name, memory, peer in steps if rank else steps[::-1]:
            me.run(name, memory, c_uint64(size), U8, peer)
        check(recv, piece(before, size), ("ring", size))

        # Every rank with every rank, itself included, twice; even ranks list the receives first.
        peers = list(range(n))
        sends = [buffer(piece(rank * 16 + peer, size)) for peer in peers * 2]
        recvs = [buffer(bytes(size)) for _ in peers * 2]
        items = [Item(0, ctypes.addressof(m), size, 7, p) for m, p in zip(sends, peers * 2, strict=True)]
        takes = [Item(1, ctypes.addressof(m), size, 7, p) for m, p in zip(recvs, peers * 2, strict=True)]
        order = takes[::-1] + items if rank % 2 == 0 else items + takes
        me.run("HcclBatchSendRecv", (Item * len(order))(*order), c_uint32(len(order)))
        for memory, peer in zip(recvs, peers * 2, strict=True):
            check(memory, piece(peer * 16 + rank, size), ("batch", size, peer))

        recvs = [buffer(bytes(size)) for _ in peers]
        me.call("HcclGroupStart")
        for peer in peers:
            me.call("HcclSend", sends[peer], c_uint64(size), U8, peer, me.comm, me.stream)
            me.call("HcclRecv", recvs[peer], c_uint64(size), U8, peer, me.comm, me.stream)
        me.call("HcclGroupEnd")
        me.wait()
        for peer in peers:
            check(recvs[peer], piece(peer * 16 + rank, size), ("group", size, peer))


@pytest.mark.parametrize("ranks", [2, 3])
def test_point_to_point(job, ranks):
    job(ranks, point_to_point)


def group_of_communicators(me: Rank) -> None:
    """One group over two communicators and two streams, in opposite orders on the two ranks."""
    other, stream = me.sub([1, 0], 3), me.new_stream()
    peer_here, peer_there = 1 - me.rank, me.rank  # the ranks are swapped in the other communicator
    send = buffer(piece(me.rank, SEVERAL_CHUNKS))
    first, second = buffer(bytes(SEVERAL_CHUNKS)), buffer(bytes(SEVERAL_CHUNKS))
    count = c_uint64(SEVERAL_CHUNKS)
    calls = [
        ("HcclSend", send, count, U8, peer_here, me.comm, me.stream),
        ("HcclRecv", first, count, U8, peer_here, me.comm, me.stream),
        ("HcclSend", send, count, U8, peer_there, other, me.stream),
        ("HcclRecv", second, count, U8, peer_there, other, stream),
    ]
    me.call("HcclGroupStart")
    for name, *arguments in calls if me.rank else calls[::-1]:
        me.call(name, *arguments)
    me.call("HcclGroupEnd")
    me.wait()
    assert me.acl.aclrtSynchronizeStream(stream) == 0
    check(first, piece(1 - me.rank, SEVERAL_CHUNKS), "first")
    check(second, piece(1 - me.rank, SEVERAL_CHUNKS), "second")
    assert me.hccl.HcclGroupEnd() == PARA


def test_group_over_communicators_and_streams(job):
    job(2, group_of_communicators)


def calls_return_at_once(me: Rank) -> None:
    memory, other = buffer(bytes([1])), buffer(bytes([1]))
    second = me.new_stream()
    if me.rank == 0:
        begin = time.monotonic()
        me.call("HcclAllReduce", memory, memory, c_uint64(1), U8, SUM, me.comm, me.stream)
        me.call("HcclAllReduce", other, other, c_uint64(1), U8, PROD, me.comm, second)
        assert time.monotonic() - begin < 5  # the other rank comes only after it
        me.meet(0)
    else:
        me.meet(0)
        me.call("HcclAllReduce", memory, memory, c_uint64(1), U8, SUM, me.comm, me.stream)
        me.call("HcclAllReduce", other, other, c_uint64(1), U8, PROD, me.comm, second)
    # Two streams, one communicator: the operations run in the order of the calls.
    assert me.acl.aclrtSynchronizeStream(second) == 0
    me.wait()
    assert (read(memory, 1), read(other, 1)) == (b"\2", b"\1")


def test_calls_return_before_the_operation_is_done(job):
    job(2, calls_return_at_once)


class Config(ctypes.Structure):
    """HcclCommConfig as HcclCommConfigInit of version 10 leaves it."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("reserved", c_uint64),
        ("buffer_size", c_uint32),
        ("deterministic", c_uint32),
        ("name", ctypes.c_char * 128),
        ("udi", ctypes.c_char * 128),
        ("op_expansion_mode", c_uint32),
        ("traffic_class", c_uint32),
        ("service_level", c_uint32),
        ("world_rank", c_uint32),
        ("job", c_uint64),
        ("zero_copy", ctypes.c_uint8),
        ("exec_timeout", ctypes.c_int32),
        ("rest", ctypes.c_char * 1920),
    )

    def __init__(self, name: str, exec_timeout: int) -> None:
        super().__init__(2240, 0xF0F0F0F0, 10, 0, 0xFFFFFFFF, 0xFFFFFFFF, name.encode(), exec_timeout=exec_timeout)


def configured(me: Rank) -> None:
    config = Config("tensor_parallel", 1)
    assert ctypes.sizeof(config) == 2240
    info = me.root_info()
    config.magic = 0
    arguments = (c_uint32(me.ranks), info, c_uint32(me.rank), ctypes.byref(config), me.byref())
    assert me.hccl.HcclCommInitRootInfoConfig(*arguments) == PARA
    config.magic = 0xF0F0F0F0
    me.call("HcclCommInitRootInfoConfig", *arguments)
    assert me.name(me.comm) == "tensor_parallel"
    assert me.hccl.HcclGetCommConfigCapability() == 12
    assert me.hccl.HcclGetErrorString(9) == b"timeout"
    assert me.hccl.HcclGetErrorString(77) == b"unknown error"
    value = c_int()
    me.call("HcclSetConfig", 0, c_int(1))
    me.call("HcclGetConfig", 0, ctypes.byref(value))
    assert value.value == 1
    assert me.hccl.HcclSetConfig(9, c_int(1)) == PARA
    for name in ("HcclCommSuspend", "HcclCommResume"):
        assert getattr(me.hccl, name)(me.comm) == NOT_SUPPORT
        assert name in me.message()
    memory = buffer(b"x")
    assert me.hccl.HcclBroadcast(memory, c_uint64(1), U8, 2, me.comm, me.stream) == PARA
    assert me.hccl.HcclBroadcast(None, c_uint64(1), U8, 0, me.comm, me.stream) == PTR
    assert me.hccl.HcclBroadcast(memory, c_uint64(1), c_int(13), 0, me.comm, me.stream) == NOT_SUPPORT
    assert me.hccl.HcclSend(memory, c_uint64(1), U8, me.rank, me.comm, me.stream) == PARA
    assert me.async_error() == 0
    # The time-out of the configuration, not that of the environment.
    if me.rank == 0:
        me.call("HcclBarrier", me.comm, me.stream)
        assert "after 1 s" in me.wait(TIMED_OUT)


def test_configuration_and_arguments(job):
    job(2, configured, init=False, HCCL_EXEC_TIMEOUT="60")


def devices_of_one_process(me: Rank) -> None:
    comms = (c_void_p * 2)()
    me.call("HcclCommInitAll", c_uint32(2), (c_int * 2)(0, 1), comms)
    memory = [buffer(piece(r, SEVERAL_CHUNKS)) for r in range(2)]
    streams = [me.stream, me.new_stream()]
    for recv, comm, stream in zip(memory, comms, streams, strict=True):
        me.call("HcclAllReduce", recv, recv, c_uint64(SEVERAL_CHUNKS), U8, SUM, c_void_p(comm), stream)
    for recv, stream in zip(memory, streams, strict=True):
        assert me.acl.aclrtSynchronizeStream(stream) == 0
        check(recv, wrapped_sum(range(2), SEVERAL_CHUNKS)[:SEVERAL_CHUNKS], "sum")
    for comm in comms:
        me.call("HcclCommDestroy", c_void_p(comm))


def test_several_devices_in_one_process(job):
    job(1, devices_of_one_process, init=False)


def never_joins(me: Rank) -> None:
    info = me.root_info()
    if me.rank != 1:
        begin = time.monotonic()
        arguments = (c_uint32(me.ranks), info, c_uint32(me.rank), me.byref())
        assert me.hccl.HcclCommInitRootInfo(*arguments) == TIMEOUT
        assert 0.4 < time.monotonic() - begin < 15
        message = me.message()
        assert "rank(s) 1 to join" in message
        assert "HCCL_CONNECT_TIMEOUT" in message


def test_a_rank_that_never_joins(job):
    job(3, never_joins, init=False, HCCL_CONNECT_TIMEOUT="0.5")


def wrong_root_info(me: Rank) -> None:
    info = me.root_info()
    head = struct.Struct("<QQQIi64s")
    magic, identity, start, process, descriptor, host = head.unpack_from(info.raw)

    def refused(expected: int, *values: object) -> str:
        other = ctypes.create_string_buffer(info.raw, ROOT_INFO_BYTES)
        head.pack_into(other, 0, *values)
        assert me.hccl.HcclCommInitRootInfo(c_uint32(1), other, c_uint32(0), me.byref()) == expected
        return me.message()

    refused(PARA, 0, identity, start, process, descriptor, host)
    away = refused(OPEN_FILE_FAILURE, magic, identity, start, 2**22 + 1, descriptor, b"elsewhere")
    assert "on host elsewhere" in away
    assert "must be on one machine" in away
    assert "has ended" in refused(OPEN_FILE_FAILURE, magic, identity, start, 2**22 + 1, descriptor, host)
    refused(OPEN_FILE_FAILURE, magic, identity + 1, start, process, descriptor, host)
    # The ranks must have been told the same number, and each rank exists once.
    assert me.hccl.HcclCommInitRootInfo(c_uint32(2), info, c_uint32(2), me.byref()) == PARA
    me.call("HcclCommInitRootInfo", c_uint32(1), info, c_uint32(0), me.byref())


def test_root_info_that_cannot_be_used(job):
    job(1, wrong_root_info, init=False)


def never_comes(me: Rank) -> None:
    memory, count = buffer(bytes(100)), c_uint64(100)
    me.run("HcclAllReduce", memory, memory, count, U8, SUM)
    if me.rank == 1:
        return
    begin = time.monotonic()
    me.call("HcclAllReduce", memory, memory, count, U8, MAX, me.comm, me.stream)
    me.call("HcclBarrier", me.comm, me.stream)  # behind it, and given up with it
    message = me.wait(TIMED_OUT)
    assert 0.4 < time.monotonic() - begin < 15
    for part in (me.name(me.comm), f"rank {me.rank} of 3", "HcclAllReduce(count 100, uint8, max)", "rank(s) 1"):
        assert part in message, message
    assert me.async_error() in (TIMEOUT, REMOTE)
    assert "HcclAllReduce" in me.message()


def test_a_rank_that_never_comes_to_an_operation(job, tmp_path):
    trace = tmp_path / "trace.jsonl"
    output = job(3, never_comes, HCCL_EXEC_TIMEOUT="1.5", NPU_SIM_TRACE=str(trace))
    assert output.count("EI0002") == 2
    # After a second the trace says who waits for whom.
    calls = [json.loads(line) for line in trace.read_text().splitlines()]
    waits = {call["rank"]: call for call in calls if call["call"] == "waits"}
    assert sorted(waits) == [0, 2]
    for call in waits.values():
        assert call["operation"] == "HcclAllReduce(count 100, uint8, max)"
        assert call["for_ranks"].startswith("1")


def waits_for_a_message(me: Rank) -> None:
    memory = buffer(bytes(1))
    if me.rank == 0:
        me.call("HcclRecv", memory, c_uint64(1), U8, 1, me.comm, me.stream)
        assert "no sign of rank(s) 1" in me.wait(TIMED_OUT)


def test_the_trace_names_the_sender_that_is_waited_for(job, tmp_path):
    trace = tmp_path / "trace.jsonl"
    job(2, waits_for_a_message, HCCL_EXEC_TIMEOUT="1.5", NPU_SIM_TRACE=str(trace))
    calls = [json.loads(line) for line in trace.read_text().splitlines()]
    (call,) = [call for call in calls if call["call"] == "waits"]
    assert (call["operation"], call["rank"], call["for_ranks"][:1]) == ("HcclRecv", 0, "1")


def both_send(me: Rank) -> None:
    memory = buffer(bytes(1))
    me.call("HcclSend", memory, c_uint64(1), U8, 1 - me.rank, me.comm, me.stream)
    me.call("HcclRecv", memory, c_uint64(1), U8, 1 - me.rank, me.comm, me.stream)
    assert f"HcclSend after 0.5 s: no sign of rank(s) {1 - me.rank}" in me.wait(TIMED_OUT)
    me.meet(0)


def test_two_ranks_that_both_send_first_hang_as_on_a_device(job):
    job(2, both_send, HCCL_EXEC_TIMEOUT="0.5")


def killed(me: Rank) -> None:
    size = 64 * 2**20
    memory = buffer(bytes(size))
    me.meet(0)
    if me.rank == 2:
        me.call("HcclAllReduce", memory, memory, c_uint64(size), U8, SUM, me.comm, me.stream)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    me.call("HcclAllReduce", memory, memory, c_uint64(size), U8, SUM, me.comm, me.stream)
    message = me.wait(TIMED_OUT)
    assert "of rank(s) 2 (its process" in message, message
    assert "is gone" in message
    assert me.async_error() == REMOTE


def test_a_killed_rank(job):
    before = set(os.listdir("/dev/shm"))
    job.start(3, killed, HCCL_EXEC_TIMEOUT="0.5")
    codes = job.finish()
    assert codes == {0: 0, 1: 0, 2: -signal.SIGKILL}, job.output()
    assert set(os.listdir("/dev/shm")) <= before


def disagree(me: Rank) -> None:
    memory, count = buffer(bytes(400)), c_uint64(100)
    if me.rank == 0:
        me.call("HcclAllReduce", memory, memory, count, U8, SUM, me.comm, me.stream)
    else:
        me.call("HcclAllReduce", memory, memory, c_uint64(40 + me.rank // 2), c_int(4), MAX, me.comm, me.stream)
    message = me.wait(TIMED_OUT)
    assert "do not agree" in message, message
    assert read(memory, 400) == bytes(400)
    assert me.async_error() == TIMEOUT
    me.meet(0)


def test_ranks_that_call_different_operations(job):
    output = job(3, disagree, HCCL_EXEC_TIMEOUT="0.5")
    said = [line for line in output.splitlines() if "EI0002" not in line]
    assert len(said) == 1
    for part in ("uint8, sum) on rank 0", "AllReduce(count 40, fp32, max) on rank 1", "count 41, fp32, max) on rank 2"):
        assert part in said[0]


def disagree_on_sizes(me: Rank) -> None:
    memory = buffer(bytes(64))
    counts = u64([1, 2 + me.rank])
    me.call("HcclAlltoAllV", memory, counts, u64([0, 8]), U8, memory, counts, u64([32, 40]), U8, me.comm, me.stream)
    message = me.wait(TIMED_OUT)
    assert "rank 0 sends 2 bytes to rank 1, which expects 1" in message, message
    me.meet(0)


def test_ranks_that_disagree_on_sizes(job):
    output = job(2, disagree_on_sizes, HCCL_EXEC_TIMEOUT="0.5")
    assert output.count("\n") == 3


def wrong_message_size(me: Rank) -> None:
    memory = buffer(bytes(8))
    name, size = (("HcclSend", 8), ("HcclRecv", 4))[me.rank]
    me.call(name, memory, c_uint64(size), U8, 1 - me.rank, me.comm, me.stream)
    me.wait(TIMED_OUT)
    me.meet(0)


def test_a_message_of_another_size_than_expected(job):
    output = job(2, wrong_message_size, HCCL_EXEC_TIMEOUT="0.5")
    assert "rank 0 sends 8 bytes to rank 1, which expects 4" in output


def destroyed(me: Rank) -> None:
    memory = buffer(bytes(SEVERAL_CHUNKS))
    if me.rank == 0:
        # Destroyed with an operation on its way: it still completes.
        me.call("HcclBroadcast", memory, c_uint64(SEVERAL_CHUNKS), U8, 1, me.comm, me.stream)
        me.call("HcclCommDestroy", me.comm)
        me.meet(0)
        me.wait()
        check(memory, piece(1, SEVERAL_CHUNKS), "broadcast")
        return
    me.meet(0)
    memory = buffer(piece(1, SEVERAL_CHUNKS))
    me.run("HcclBroadcast", memory, c_uint64(SEVERAL_CHUNKS), U8, 1)
    # The process ends while an operation waits for a rank that has gone.
    me.call("HcclBarrier", me.comm, me.stream)
    time.sleep(0.05)


def test_destruction_and_exit_with_operations_on_their_way(job):
    begin = time.monotonic()
    job(2, destroyed)
    assert time.monotonic() - begin < 15


def cancelled(me: Rank) -> None:
    if me.rank == 0:
        me.call("HcclBarrier", me.comm, me.stream)
        begin = time.monotonic()
        assert me.acl.aclrtDestroyStreamForce(me.stream) == 0
        while me.async_error() == 0:
            assert time.monotonic() - begin < 15
            time.sleep(0.005)
        assert "was given up" in me.message()
    me.meet(0)


def test_a_stream_destroyed_by_force(job):
    job(2, cancelled)


def traced(me: Rank) -> None:
    memory, count = buffer(bytes(64)), c_uint64(8)
    kind = c_int(TYPES["fp16"][0])
    me.run("HcclReduceScatter", memory, memory, count, kind, MAX)
    me.run("HcclBroadcast", memory, count, kind, 1)
    me.run("HcclSend" if me.rank else "HcclRecv", memory, count, kind, 1 - me.rank)


def test_trace(job, tmp_path):
    trace = tmp_path / "trace.jsonl"
    job(2, traced, NPU_SIM_TRACE=str(trace))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    calls = {(line["call"], line.get("rank")): line for line in lines if line["call"].startswith("Hccl")}
    created = [calls["HcclCommInitRootInfo", rank] for rank in range(2)]
    assert created[0]["id"] == created[1]["id"] == calls["HcclGetRootInfo", None]["id"]
    for rank in range(2):
        line = calls["HcclReduceScatter", rank]
        assert line["comm"].startswith("hccl_sim_")
        assert (line["ranks"], line["count"], line["dtype"], line["bytes"], line["op"]) == (2, 8, "fp16", 32, "max")
        assert calls["HcclBroadcast", rank]["root"] == 1
        assert calls["HcclBroadcast", rank]["bytes"] == 16
        line = calls["HcclSend" if rank else "HcclRecv", rank]
        assert (line["bytes"], line["peer"], line["direction"]) == (16, 1 - rank, "send" if rank else "recv")
