"""The simulated device's C functions, called directly: memory, streams, events, callbacks, errors.

Each test runs in a process of its own, because settings are read when the library is loaded and a fault in C must end
one test only. torch is not imported.
"""

import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_debug.simulation import build

MIB = 1 << 20
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, ANY_DIRECTION = 1, 2, 3, 4
TIMED = 0x08
OUT_OF_MEMORY, INVALID, NOT_IMPLEMENTED, NO_DEVICE_CHOSEN = 207001, 107000, 507000, 107002
SYNC_TIMEOUT, EVENT_TIMEOUT, BAD_HANDLE, BAD_TIMESTAMP = 507046, 507047, 107017, 107006
Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Failed(Exception):
    """A call returned an error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


class Acl:
    """The library: a call that returns an error raises it."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(build.library_folder() / "libascendcl.so"))
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.callbacks: list[object] = []  # kept: C holds no reference to them

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name)

        def call(*arguments: object) -> None:
            code = function(*(ctypes.c_size_t(a) if isinstance(a, int) and a > 0x7FFFFFFF else a for a in arguments))
            if code:
                raise Failed(code, self.library.aclGetRecentErrMsg().decode())

        return call

    def fails(self, name: str, *arguments: object) -> Failed:
        with pytest.raises(Failed) as caught:
            getattr(self, name)(*arguments)
        return caught.value

    def pointer(self, name: str, *arguments: object) -> int:
        """The address that a call gives by its first argument."""
        address = ctypes.c_void_p()
        getattr(self, name)(ctypes.byref(address), *arguments)
        assert address.value
        return address.value

    def number(self, name: str, *arguments: object, kind: type = ctypes.c_int32) -> int:
        """The number that a call gives by its last argument."""
        number = kind(-1)
        getattr(self, name)(*arguments, ctypes.byref(number))
        return number.value

    def stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.pointer("aclrtCreateStreamWithConfig", 0, 3))

    def event(self, flags: int = TIMED) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.pointer("aclrtCreateEventExWithFlag", flags))

    def memory(self, size: int) -> int:
        return self.pointer("aclrtMalloc", ctypes.c_size_t(size), 0)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total))
        return free.value

    def occupy(self, stream: ctypes.c_void_p) -> threading.Event:
        """Keep the stream busy until the result is set."""
        gate = threading.Event()
        self.run(stream, lambda: gate.wait(30))
        return gate

    def run(self, stream: ctypes.c_void_p, function: Callable[[], object]) -> None:
        self.callbacks.append(Task(lambda _: function() and None))
        self.aclrtLaunchHostFunc(stream, self.callbacks[-1], None)

    def is_done(self, event: ctypes.c_void_p) -> bool:
        return self.number("aclrtQueryEventStatus", event) == 1


def _unavailable() -> str | None:
    try:
        build.library_folder()
    except build.SimError as error:
        return f"needs a C and a C++ compiler and torch_npu {build.TORCH_NPU_VERSION}: {error}"
    return None


def in_own_process(body: Callable[[Acl], None] | None = None, **settings: str) -> Callable[..., None]:
    """Run the function in a new process with these environment variables."""
    if body is None:
        return functools.partial(in_own_process, **settings)

    def test() -> None:
        if reason := _unavailable():
            pytest.skip(reason)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("NPU_SIM_", "ASCEND_"))}
        environment |= {"NPU_SIM_MEMORY": str(64 * MIB), "NPU_SIM_DEVICES": "2"} | settings
        result = subprocess.run(
            [sys.executable, "-W", "error", __file__, body.__name__],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, result.stdout + result.stderr

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    test.body = body  # type: ignore[attr-defined]
    return test


@in_own_process
def test_memory_is_counted_against_the_limit(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    assert acl.free_bytes() == 64 * MIB
    first = acl.memory(48 * MIB)
    assert first % 512 == 0
    error = acl.fails("aclrtMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(17 * MIB), 0)
    assert error.code == OUT_OF_MEMORY
    assert "in use" in error.message
    acl.aclrtSetDevice(1)
    assert acl.free_bytes() == 64 * MIB  # each device has its own
    acl.memory(64 * MIB)
    acl.aclrtSetDevice(0)
    acl.aclrtFree(ctypes.c_void_p(first))
    assert acl.free_bytes() == 64 * MIB
    assert acl.fails("aclrtFree", ctypes.c_void_p(first)).code == 207002


@in_own_process(NPU_SIM_MEMORY=str(1 << 40))
def test_untouched_memory_is_not_taken_from_the_host(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    block = acl.memory(1 << 39)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    acl.aclrtMemset(ctypes.c_void_p(block), ctypes.c_size_t(64 * MIB), 1, ctypes.c_size_t(64 * MIB))
    assert resident() - before >= 63 * MIB
    acl.aclrtFree(ctypes.c_void_p(block))
    assert resident() - before < 8 * MIB


@in_own_process
def test_copies_check_their_bounds(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    block = acl.memory(4096)
    source, back = ctypes.create_string_buffer(b"x" * 4096, 4096), ctypes.create_string_buffer(4096)
    device, size = ctypes.c_void_p(block), ctypes.c_size_t(4096)
    acl.aclrtMemcpy(device, size, source, size, HOST_TO_DEVICE)
    acl.aclrtMemcpy(back, size, device, size, DEVICE_TO_HOST)
    assert back.raw == source.raw
    too_small = acl.fails("aclrtMemcpy", device, ctypes.c_size_t(4095), source, size, HOST_TO_DEVICE)
    assert (too_small.code, "4096 bytes into room for 4095" in too_small.message) == (INVALID, True)
    past = acl.fails("aclrtMemcpy", ctypes.c_void_p(block + 1), size, source, size, HOST_TO_DEVICE)
    assert "past the end" in past.message
    assert "is not device memory" in acl.fails("aclrtMemcpy", back, size, source, size, HOST_TO_DEVICE).message
    assert acl.fails("aclrtMemset", device, ctypes.c_size_t(1), 0, size).code == INVALID


@in_own_process
def test_virtual_memory_is_mapped_piece_by_piece(acl: Acl) -> None:
    class Property(ctypes.Structure):
        _fields_ = [("handle_type", ctypes.c_int), ("allocation_type", ctypes.c_int), ("attribute", ctypes.c_int)]
        _fields_ += [("device", ctypes.c_uint32), ("location_type", ctypes.c_int), ("reserve", ctypes.c_uint64)]

    acl.aclrtSetDevice(0)
    piece, zero = ctypes.c_size_t(2 * MIB), ctypes.c_size_t(0)
    start = acl.pointer("aclrtReserveMemAddress", ctypes.c_size_t(1 << 40), zero, None, ctypes.c_uint64(1))
    assert start % (2 * MIB) == 0
    assert acl.free_bytes() == 64 * MIB
    wanted = Property(0, 0, 4, 0, 1, 0)
    handles = []
    for index in range(2):
        handle = ctypes.c_void_p(acl.pointer("aclrtMallocPhysical", piece, ctypes.byref(wanted), ctypes.c_uint64(0)))
        acl.aclrtMapMem(ctypes.c_void_p(start + index * 2 * MIB), piece, zero, handle, ctypes.c_uint64(0))
        handles.append(handle)
    assert acl.free_bytes() == 60 * MIB
    # A copy may cross from one piece to the next, and the same memory can be seen at a second address.
    text = ctypes.create_string_buffer(b"across two pieces")
    size = ctypes.c_size_t(len(text))
    acl.aclrtMemcpy(ctypes.c_void_p(start + 2 * MIB - 4), size, text, size, HOST_TO_DEVICE)
    acl.aclrtMapMem(ctypes.c_void_p(start + 8 * MIB), piece, zero, handles[1], ctypes.c_uint64(0))
    assert ctypes.string_at(start + 8 * MIB, 8) == text.raw[4:12]
    assert acl.fails("aclrtReleaseMemAddress", ctypes.c_void_p(start)).code == INVALID
    for offset in (0, 2, 8):
        acl.aclrtUnmapMem(ctypes.c_void_p(start + offset * MIB))
    for handle in handles:
        acl.aclrtFreePhysical(handle)
    acl.aclrtReleaseMemAddress(ctypes.c_void_p(start))
    assert acl.free_bytes() == 64 * MIB
    too_much = (ctypes.c_size_t(66 * MIB), ctypes.byref(wanted), ctypes.c_uint64(0))
    error = acl.fails("aclrtMallocPhysical", ctypes.byref(ctypes.c_void_p()), *too_much)
    assert error.code == OUT_OF_MEMORY


@in_own_process
def test_pointers_say_where_they_lie(acl: Acl) -> None:
    acl.aclrtSetDevice(1)
    attributes = (ctypes.c_uint32 * 8)()
    registered = ctypes.create_string_buffer(100)

    def place(pointer: object) -> tuple[int, int]:
        acl.aclrtPointerGetAttributes(pointer, attributes)
        return attributes[1], attributes[0]

    assert place(ctypes.c_void_p(acl.memory(4096) + 100)) == (1, 1)
    assert place(ctypes.c_void_p(acl.pointer("aclrtMallocHost", ctypes.c_size_t(100)))) == (0, 0)
    assert place(registered)[0] == 2
    acl.aclrtHostRegisterV2(registered, ctypes.c_uint64(100), 0)
    assert place(registered)[0] == 0
    assert acl.fails("aclrtHostRegisterV2", registered, ctypes.c_uint64(100), 0).code == 507910
    acl.aclrtHostUnregister(registered)
    assert place(registered)[0] == 2


@in_own_process
def test_an_event_on_a_busy_stream_waits_its_turn(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    stream, before, after = acl.stream(), acl.event(), acl.event()
    assert not acl.is_done(before)  # never recorded
    acl.aclrtRecordEvent(before, stream)
    assert acl.is_done(before)  # an idle stream records at once
    gate = acl.occupy(stream)
    acl.aclrtRecordEvent(after, stream)
    assert not acl.is_done(after)
    elapsed = ctypes.c_float()
    assert acl.fails("aclrtEventElapsedTime", ctypes.byref(elapsed), before, after).code == BAD_TIMESTAMP
    assert acl.fails("aclrtSynchronizeEventWithTimeout", after, 5).code == EVENT_TIMEOUT
    timeout = acl.fails("aclrtSynchronizeStreamWithTimeout", stream, 5)
    assert (timeout.code, "busy with aclrtLaunchHostFunc" in timeout.message) == (SYNC_TIMEOUT, True)
    time.sleep(0.1)
    gate.set()
    acl.aclrtSynchronizeEvent(after)
    assert acl.is_done(after)
    acl.aclrtEventElapsedTime(ctypes.byref(elapsed), before, after)
    assert 100 <= elapsed.value < 30000
    assert acl.number("aclrtStreamQuery", stream) == 0


@in_own_process
def test_times_are_finer_than_a_millisecond(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    stream, first, second, elapsed = acl.stream(), acl.event(), acl.event(), ctypes.c_float()
    times = []
    for _ in range(20):  # the best of them: the machine may take the processor away in between
        acl.aclrtRecordEvent(first, stream)
        acl.aclrtRecordEvent(second, stream)
        acl.aclrtEventElapsedTime(ctypes.byref(elapsed), first, second)
        times.append(elapsed.value)
    assert 0 < min(times) < 1
    untimed = acl.event(0)
    acl.aclrtRecordEvent(untimed, stream)
    assert acl.fails("aclrtEventElapsedTime", ctypes.byref(elapsed), first, untimed).code == BAD_TIMESTAMP


@in_own_process
def test_a_wait_is_for_the_recording_of_its_time(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    one, two, waiting, event = acl.stream(), acl.stream(), acl.stream(), acl.event()
    order: list[str] = []
    first, second = acl.occupy(one), acl.occupy(two)
    acl.aclrtRecordEvent(event, one)
    acl.aclrtStreamWaitEvent(waiting, event)
    acl.run(waiting, lambda: order.append("waited"))
    acl.aclrtRecordEvent(event, two)  # does not change what `waiting` waits for
    time.sleep(0.02)
    assert order == []
    first.set()
    acl.aclrtSynchronizeStream(waiting)
    assert order == ["waited"]
    assert not acl.is_done(event)
    acl.aclrtDestroyEvent(event)  # while its recording is still pending
    second.set()
    acl.aclrtSynchronizeDevice()


@in_own_process
def test_work_behind_a_busy_stream_keeps_its_order(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    stream, size = acl.stream(), ctypes.c_size_t(8)
    block = ctypes.c_void_p(acl.memory(4096))
    pinned = acl.pointer("aclrtMallocHost", size)
    source = ctypes.create_string_buffer(b"original", 8)
    gate = acl.occupy(stream)
    acl.aclrtMemcpyAsync(block, size, source, size, HOST_TO_DEVICE, stream)
    source.raw = b"changed!"  # pageable memory is free again when the call is back
    acl.aclrtMemcpyAsync(ctypes.c_void_p(pinned), size, block, size, DEVICE_TO_HOST, stream)
    acl.aclrtMemsetAsync(block, size, 0, size, stream)
    pending = ctypes.c_int32.in_dll(acl.library, "sim_pending_tasks")
    assert pending.value == 4
    assert ctypes.string_at(pinned, 8) == bytes(8)
    gate.set()
    acl.aclrtSynchronizeStream(stream)
    assert pending.value == 0
    assert ctypes.string_at(pinned, 8) == b"original"
    assert ctypes.string_at(block.value, 8) == bytes(8)


@in_own_process
def test_a_stream_waits_for_a_value(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    one, two = acl.stream(), acl.stream()
    flag = ctypes.c_void_p(acl.memory(8))
    acl.aclrtValueWait(flag, ctypes.c_uint64(7), 1, one)
    assert acl.fails("aclrtSynchronizeStreamWithTimeout", one, 10).code == SYNC_TIMEOUT
    acl.aclrtValueWrite(flag, ctypes.c_uint64(7), 0, two)
    acl.aclrtSynchronizeStream(one)
    assert acl.fails("aclrtValueWait", ctypes.c_void_p(flag.value + 1), ctypes.c_uint64(7), 1, one).code == 107008


@in_own_process
def test_a_wait_ends_with_its_time_out(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    busy, waiting, event, later = acl.stream(), acl.stream(), acl.event(), acl.event()
    acl.aclrtSetStreamFailureMode(waiting, ctypes.c_uint64(1))
    acl.aclrtSetOpWaitTimeout(1)
    gate = acl.occupy(busy)
    acl.aclrtRecordEvent(event, busy)
    acl.aclrtStreamWaitEvent(waiting, event)
    ran: list[str] = []
    acl.run(waiting, lambda: ran.append("behind the failure"))
    acl.aclrtRecordEvent(later, waiting)
    for _ in range(2):  # the stream keeps its error
        error = acl.fails("aclrtSynchronizeStream", waiting)
        assert (error.code, "no event after 1 s" in error.message) == (107020, True)
    assert ran == []
    assert acl.fails("aclrtSynchronizeEvent", later).code == 107020
    assert acl.fails("aclrtMemsetAsync", ctypes.c_void_p(acl.memory(8)), 8, 0, 8, waiting).code == 107020
    gate.set()
    acl.aclrtDeviceTaskAbort(0, 1000)
    acl.run(waiting, lambda: ran.append("after the abort"))
    acl.aclrtSynchronizeStream(waiting)
    assert ran == ["after the abort"]


@in_own_process
def test_a_stream_destroyed_by_force_gives_up(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    stream, flag = acl.stream(), ctypes.c_void_p(acl.memory(8))
    acl.aclrtValueWait(flag, ctypes.c_uint64(1), 1, stream)
    acl.aclrtDestroyStreamForce(stream)
    acl.aclrtSynchronizeDeviceWithTimeout(5000)
    assert acl.fails("aclrtSynchronizeStream", stream).code == BAD_HANDLE


@in_own_process
def test_a_callback_runs_in_the_thread_that_asked_for_it(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    stream, ran = acl.stream(), []
    function = Task(lambda _: ran.append(threading.get_ident()))
    assert acl.fails("aclrtLaunchCallback", function, None, 1, stream).code == 100034

    def serve() -> None:
        while not ran:
            acl.library.aclrtProcessReport(20)

    thread = threading.Thread(target=serve)
    thread.start()
    acl.aclrtSubscribeReport(ctypes.c_uint64(thread.ident), stream)
    acl.aclrtLaunchCallback(function, None, 1, stream)
    acl.aclrtSynchronizeStream(stream)
    assert ran == [thread.ident]
    thread.join()
    acl.aclrtUnSubscribeReport(ctypes.c_uint64(thread.ident), stream)


@in_own_process
def test_a_thread_has_no_device_before_it_chooses_one(acl: Acl) -> None:
    assert acl.fails("aclrtMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(8), 0).code == NO_DEVICE_CHOSEN
    assert acl.fails("aclrtGetDevice", ctypes.byref(ctypes.c_int32())).code == NO_DEVICE_CHOSEN
    assert acl.fails("aclrtSetDevice", 2).code == 107001
    acl.aclrtSetDevice(1)
    assert acl.number("aclrtGetDevice") == 1
    context = ctypes.c_void_p(acl.pointer("aclrtGetCurrentContext"))
    seen: list[int] = []

    def other() -> None:
        acl.aclrtSetCurrentContext(context)
        seen.append(acl.number("aclrtGetDevice"))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [1]


@in_own_process
def test_errors_are_told_once_and_name_the_function(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    error = acl.fails("aclmdlRIExecuteAsync", None, None)
    says = "simulated device: aclmdlRIExecuteAsync is not implemented"
    assert (error.code, error.message) == (NOT_IMPLEMENTED, says)
    assert acl.library.aclGetRecentErrMsg() == b""
    assert acl.library.aclrtPeekAtLastError(0) == NOT_IMPLEMENTED
    assert acl.library.aclrtGetLastError(0) == NOT_IMPLEMENTED
    assert acl.library.aclrtGetLastError(0) == 0
    refused = acl.fails("aclopCompileAndExecute", b"MatMul", 0, None, None, 0, None, None, None, 0, 0, None, None)
    assert "operator MatMul has no kernel" in refused.message
    assert "cannot be captured" in acl.fails("aclmdlRICaptureBegin", acl.stream(), 0).message


@in_own_process(NPU_SIM_SOC="Ascend910B4", NPU_SIM_DEVICES="4", ASCEND_RT_VISIBLE_DEVICES="3,1")
def test_settings_describe_the_device(acl: Acl) -> None:
    acl.library.aclrtGetSocName.restype = ctypes.c_char_p
    assert acl.library.aclrtGetSocName() == b"Ascend910B4"
    assert acl.number("aclrtGetDeviceCount", kind=ctypes.c_uint32) == 2
    assert acl.number("aclGetDeviceCapability", 0, 0, kind=ctypes.c_int64) == 20
    assert acl.number("aclrtGetDeviceInfo", 0, 301, kind=ctypes.c_int64) == 64 * MIB
    assert acl.number("aclrtGetDeviceInfo", 0, 402, kind=ctypes.c_int64) == 3  # the physical number
    value = ctypes.create_string_buffer(16)
    acl.aclGetCompileopt(10, value, ctypes.c_size_t(16))
    assert value.value == b"disable"


@in_own_process
def test_a_child_process_inherits_no_work(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    stream = acl.stream()
    gate = acl.occupy(stream)
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        done = acl.library.aclrtSynchronizeDeviceWithTimeout(-1)
        os._exit(done)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()
    acl.aclrtSynchronizeStream(stream)


@in_own_process
def test_a_process_ends_while_a_stream_waits(acl: Acl) -> None:
    acl.aclrtSetDevice(0)
    acl.aclrtValueWait(ctypes.c_void_p(acl.memory(8)), ctypes.c_uint64(1), 1, acl.stream())


def test_the_trace_has_a_line_for_each_call(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    in_own_process(test_errors_are_told_once_and_name_the_function.body, NPU_SIM_TRACE=str(trace))()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {"time", "pid", "thread", "call"} <= lines[0].keys()
    refused = next(line for line in lines if line["call"] == "aclopCompileAndExecute")
    assert (refused["operator"], refused["implemented"]) == ("MatMul", False)


if __name__ == "__main__":
    globals()[sys.argv[1]].body(Acl())
