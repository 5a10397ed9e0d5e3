"""Devices, streams, events, memory, tracing and the fused operators of torch_npu on simulated devices."""

import gc
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="install npu-debug[sim] to run the tests on simulated devices")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.sim

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def every_device_is_used(sim: object) -> None:
    """A backward pass aborts the process after a device was selected on which nothing has happened yet: "Uninitialized
    default NPU stream" is torch_npu 2.14's own check. Whether real devices do the same was not tried.
    """
    for index in range(torch.npu.device_count()):
        torch.ones(1, device=f"npu:{index}")


def accelerator_index() -> int:
    return torch.accelerator.current_device_index()


def test_the_accelerator_is_npu() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == torch.npu.device_count() == int(os.environ.get("NPU_SIM_DEVICES", "8"))
    assert torch.npu.get_device_name(0) == os.environ.get("NPU_SIM_SOC", "Ascend910B1")
    assert torch.npu.get_device_properties(0).total_memory == torch.npu.mem_get_info(0)[1]


def test_the_current_device() -> None:
    assert accelerator_index() == 0
    with torch.accelerator.device_index(2):
        assert accelerator_index() == torch.npu.current_device() == 2
        assert torch.ones(1, device="npu").device.index == 2
        with torch.npu.device(3):
            assert torch.ones(1, device="npu").device.index == 3
        assert accelerator_index() == 2
    assert accelerator_index() == 0
    torch.accelerator.set_device_index(1)
    try:
        assert torch.zeros(1, device="npu").device.index == 1
        # Work goes where its tensors are.
        assert (torch.ones(1, device="npu:4") + 1).device.index == 4
    finally:
        torch.accelerator.set_device_index(0)


@pytest.mark.parametrize("call", [lambda: torch.accelerator.set_device_index(99), lambda: torch.npu.set_device(99)])
def test_a_device_that_does_not_exist(call: object) -> None:
    with pytest.raises(RuntimeError, match=r"Invalid device ID|device 99 does not exist"):
        call()
    assert accelerator_index() == 0


def test_a_default_device() -> None:
    with torch.device("npu:1"):
        layer = nn.Linear(2, 2)
        assert layer.weight.device == torch.zeros(1).device == torch.device("npu:1")


def test_devices_have_memory_of_their_own() -> None:
    before = [torch.npu.memory_allocated(i) for i in range(3)]
    x = torch.empty(MIB, dtype=torch.uint8, device="npu:1")
    y = x.to("npu:2")
    after = [torch.npu.memory_allocated(i) for i in range(3)]
    assert [a - b for a, b in zip(after, before, strict=True)] == [0, block(MIB), block(MIB)]
    assert x.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("api", ["torch", "torch.npu"])
def test_streams_and_events(api: str) -> None:
    stream = torch.Stream("npu") if api == "torch" else torch.npu.Stream()
    default = torch.accelerator.current_stream()
    with stream if api == "torch" else torch.npu.stream(stream):
        current = torch.accelerator.current_stream() if api == "torch" else torch.npu.current_stream()
        assert current == stream
        x = torch.ones(3, device="npu") * 2
    assert torch.accelerator.current_stream() == default
    event = stream.record_event()
    default.wait_event(event)
    default.wait_stream(stream)
    event.synchronize()
    stream.synchronize()
    assert event.query()
    assert stream.query()
    assert x.tolist() == [2, 2, 2]
    x.record_stream(torch.npu.current_stream())


def test_events_measure_time() -> None:
    a, b, c = (torch.Event("npu", enable_timing=True) for _ in range(3))
    start = time.perf_counter()
    a.record()
    time.sleep(0.05)
    b.record()
    time.sleep(0.01)
    c.record()
    torch.accelerator.synchronize()
    whole = 1000 * (time.perf_counter() - start)
    assert 50 <= a.elapsed_time(b) <= whole
    assert 10 <= b.elapsed_time(c) <= whole
    assert a.elapsed_time(c) == pytest.approx(a.elapsed_time(b) + b.elapsed_time(c), abs=0.01)


def test_an_event_without_time_is_refused() -> None:
    event = torch.npu.Event()
    event.record()
    with pytest.raises((ValueError, RuntimeError)):
        event.elapsed_time(event)


def test_synchronizing() -> None:
    torch.npu.synchronize()
    torch.npu.synchronize(1)
    torch.accelerator.synchronize("npu:2")
    assert torch.npu.current_stream(1).device.index == 1


def block(size: int) -> int:
    """What torch_npu's allocator counts for a tensor: 32 bytes of padding, in steps of 512."""
    return math.ceil((size + 32) / 512) * 512


@pytest.fixture
def counted() -> Iterator[None]:
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    gc.disable()  # what other tests have left must not be freed in between
    yield
    gc.enable()


@pytest.mark.parametrize("size", [1, 480, 481, 4096, MIB])
def test_the_bytes_of_a_tensor(counted: None, size: int) -> None:
    before = torch.npu.memory_allocated()
    x = torch.empty(size, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - before == block(size)
    y = x[1:]
    del x
    assert torch.npu.memory_allocated() - before == block(size)
    del y
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before == block(size)


def test_the_peak_of_a_training_step_is_the_hand_count(counted: None) -> None:
    before = torch.npu.memory_allocated()
    n = 256
    square, number = block(4 * n * n), block(4)
    weight = nn.Parameter(torch.ones(n, n, device="npu"))
    x = torch.ones(n, n, device="npu")
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9, foreach=False)

    torch.npu.reset_peak_memory_stats()
    loss = (x @ weight).sum()
    # The product is not kept: sum() needs its size alone.
    assert torch.npu.memory_allocated() - before == 2 * square + number
    assert torch.npu.max_memory_allocated() - before == 3 * square + number

    torch.npu.reset_peak_memory_stats()
    loss.backward()
    # x, weight and the gradient, the loss and its gradient.
    assert torch.npu.max_memory_allocated() - before == 3 * square + 2 * number
    assert torch.npu.memory_allocated() - before == 3 * square + number

    torch.npu.reset_peak_memory_stats()
    optimizer.step()
    # And the momentum, whose first value is a copy of the gradient.
    assert torch.npu.max_memory_allocated() - before == 4 * square + number

    optimizer.zero_grad()
    del loss
    assert torch.npu.memory_allocated() - before == 3 * square
    assert torch.accelerator.memory_allocated() == torch.npu.memory_allocated()
    assert torch.accelerator.max_memory_allocated() == torch.npu.max_memory_allocated()


def test_activations_are_kept_until_backward_and_checkpointing_saves_them(counted: None) -> None:
    from torch.utils.checkpoint import checkpoint

    def peak(with_checkpoint: bool) -> int:
        x = torch.ones(MIB // 4, device="npu", requires_grad=True)
        before = torch.npu.memory_allocated()

        def four_sines(t: torch.Tensor) -> torch.Tensor:
            return t.sin().sin().sin().sin()

        y = checkpoint(four_sines, x, use_reentrant=False) if with_checkpoint else four_sines(x)
        assert y.requires_grad
        return torch.npu.memory_allocated() - before

    # sin keeps its input: three results and the last, against the last alone.
    assert (peak(False), peak(True)) == (4 * block(MIB), block(MIB))


def test_memory_statistics(counted: None) -> None:
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="npu")
    stats = torch.npu.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.npu.memory_allocated()
    assert torch.npu.memory_reserved() >= torch.npu.memory_allocated()
    assert torch.npu.max_memory_reserved() >= torch.npu.memory_reserved()
    assert "NPU memory summary" in torch.npu.memory_summary()
    assert sum(segment["allocated_size"] for segment in torch.npu.memory_snapshot()) >= x.nbytes


def test_the_free_memory_of_the_device(counted: None) -> None:
    free, total = torch.npu.mem_get_info()
    reserved = torch.npu.memory_reserved()
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
    taken = free - torch.npu.mem_get_info()[0]
    assert taken == torch.npu.memory_reserved() - reserved >= 64 * MIB
    del x
    assert free - torch.npu.mem_get_info()[0] == taken, "the cache keeps it"
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info() == (free, total)


def test_more_than_the_device_has_is_refused_and_the_process_goes_on() -> None:
    total = torch.npu.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(2 * total, dtype=torch.uint8, device="npu")
    assert (torch.ones(3, device="npu") + 1).tolist() == [2, 2, 2]


def test_the_limit_of_a_small_device() -> None:
    program = """
import npu_debug.sim, torch
MIB = 1 << 20
assert torch.npu.mem_get_info()[1] == 64 * MIB, torch.npu.mem_get_info()
first = torch.zeros(40 * MIB, dtype=torch.uint8, device="npu")
try:
    torch.zeros(40 * MIB, dtype=torch.uint8, device="npu")
    raise SystemExit("80 of 64 MiB were given")
except torch.OutOfMemoryError as error:
    # The allocator's padding and its steps of 2 MiB.
    assert "Tried to allocate 42.00 MiB" in str(error), error
other = torch.zeros(40 * MIB, dtype=torch.uint8, device="npu:1")
del first
again = torch.zeros(50 * MIB, dtype=torch.uint8, device="npu") + 1
"""
    # The last line needs 50 MiB twice: the first is there again, the second is not.
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "NPU_SIM_MEMORY": str(64 * MIB), "NPU_SIM_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("torch.OutOfMemoryError: NPU out of memory. Tried to allocate 52")


def test_fake_tensors_have_shapes_and_no_memory(counted: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.npu.memory_allocated()
    with FakeTensorMode():
        x = torch.empty(1 << 20, 1 << 14, device="npu", dtype=torch.bfloat16)  # 32 GiB
        w = torch.empty(1 << 14, 8, device="npu", dtype=torch.bfloat16, requires_grad=True)
        y = x @ w
        y.sum().backward()
        assert (y.shape, y.device, w.grad.shape) == ((1 << 20, 8), torch.device("npu:0"), w.shape)
        image = F.conv2d(torch.empty(1, 2, 4, 4, device="npu"), torch.empty(3, 2, 3, 3, device="npu"))
        assert (image.shape, image.device.type) == ((1, 3, 2, 2), "npu")
    assert torch.npu.memory_allocated() == before


def test_fused_operators_have_shapes_of_torch_npu(counted: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y, rstd = torch.ops.npu.npu_rms_norm(torch.empty(2, 3, device="npu"), torch.empty(3, device="npu"))
        assert (y.shape, rstd.shape, rstd.dtype, y.device.type) == ((2, 3), (2, 1), torch.float32, "npu")
        assert torch.ops.npu.npu_swiglu(torch.empty(2, 8, device="npu"), -1).shape == (2, 4)
        q = torch.empty(1, 8, 16, 32, device="npu", dtype=torch.float16)
        out, maximum, *_ = torch.ops.npu.npu_fusion_attention(q, q, q, 8, "BNSD")
        assert (out.shape, maximum.shape) == ((1, 8, 16, 32), (1, 8, 16, 8))


def test_compiling_with_aot_eager_gives_the_numbers_of_eager() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to("npu")
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    x = torch.arange(12.0, device="npu").view(3, 4).sin()

    def run(function: object) -> list[torch.Tensor]:
        net.zero_grad()
        y = function(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in net.parameters())]

    for eager, traced in zip(run(net), run(compiled), strict=True):
        assert eager.equal(traced)


WRONG = {
    "storage of 0 bytes": (lambda x: (x.untyped_storage().resize_(0), x.sum()), "its storage was resized to 0 bytes"),
    "foreach on two devices": (lambda x: torch._foreach_add([x], [x.to("npu:1")]), "npu:0 and npu:1"),
    "a target on the host": (lambda x: torch.tensor(1.0).add_(x[0]), "npu:0 and cpu"),
    "out on the host": (lambda x: torch.sum(x, dim=0, out=torch.tensor(0.0)), "npu:0 and cpu"),
    "a list with one on the host": (lambda x: torch.stack([x[0], torch.tensor(1.0)]), "npu:0 and cpu"),
    "another device's generator": (
        lambda x: torch.randn(2, device=x.device, generator=torch.Generator("npu:1")),
        "a generator of npu:0 but found one of npu:1",
    ),
    "in place into nothing": (
        lambda x: torch.zeros(0, 1, 3, device="npu").ldexp_(torch.ones(0, 9, 3, device="npu")),
        "doesn't match the broadcast shape",
    ),
    "shared memory": (lambda x: x.untyped_storage()._share_npu_(), "aclrtIpcMemGetExportKey is not implemented"),
}


@pytest.mark.parametrize(("call", "says"), list(WRONG.values()), ids=list(WRONG))
def test_what_a_device_would_refuse(call: object, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        call(torch.arange(4.0, device="npu"))


def test_lists_may_be_of_several_devices() -> None:
    ones = [torch.ones(2, device=device) for device in ("npu:0", "npu:1")]
    assert [t.tolist() for t in torch._foreach_add(ones, ones)] == [[2, 2], [2, 2]]
    assert [str(t.device) for t in torch._foreach_mul(ones, torch.tensor(3.0))] == ["npu:0", "npu:1"]


def test_a_forked_process_cannot_go_on_with_the_devices() -> None:
    x = torch.arange(4.0, device="npu")
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, str((x + 1).tolist()).encode())
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "the devices were in use when this process was forked" in os.read(reading, 4096).decode()
    os.close(reading)
    os.close(writing)
    assert (x + 1).tolist() == [1, 2, 3, 4]


ATTENTION = {
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    "grouped": {"enable_gqa": True, "scale": 0.3},
    "unfused": {"dropout_p": 1e-7},
}


@pytest.mark.parametrize("options", list(ATTENTION.values()), ids=list(ATTENTION))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_attention_compiles_to_the_numbers_of_eager(options: dict[str, object], backend: str) -> None:
    options = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    heads = 2 if "enable_gqa" in options else 4

    def attention(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x[:, :heads], x[:, :heads], **options)

    x = torch.arange(4 * 6 * 8.0).view(1, 4, 6, 8).sin().npu().requires_grad_()
    results = []
    for function in (attention, torch.compile(attention, backend=backend, fullgraph=True)):
        out = function(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        results.append((out.detach(), grad))
    for eager, traced in zip(*results, strict=True):
        # The unfused formula drops, with a chance of 1e-7, and scales by 1 / (1 - 1e-7).
        torch.testing.assert_close(traced, eager, rtol=1e-5 if "dropout_p" in options else 0, atol=1e-6)


def test_attention_under_functional_gradients() -> None:
    q = torch.arange(24.0).view(1, 1, 4, 6).cos()

    def loss(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    assert torch.func.grad(loss)(q.npu()).cpu().equal(torch.func.grad(loss)(q))


def test_a_compiled_dropout_and_a_compiled_encoder() -> None:
    x = torch.ones(64, 64, device="npu", requires_grad=True)
    dropped = torch.compile(lambda x: F.dropout(x, 0.25), backend="eager", fullgraph=True)(x)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.75])
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).npu()
    torch.compile(layer, backend="aot_eager")(torch.ones(2, 5, 16, device="npu")).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_convolution_is_as_the_compiler_is_told() -> None:
    weight, x = torch.ones(8, 3, 3, 3, device="npu"), torch.ones(2, 3, 8, 8).npu()
    x = x.to(memory_format=torch.channels_last)
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        told = F.conv2d(mode.from_tensor(x), mode.from_tensor(weight)).stride()
    assert F.conv2d(x, weight).stride() == told
    flat = torch.compile(lambda x: F.conv2d(x, weight).flatten(1), backend="aot_eager")(x)
    assert flat.unique().tolist() == [27.0]


def test_an_operator_that_no_kernel_can_stand_in_for_names_itself() -> None:
    with pytest.raises(NotImplementedError, match="simulated devices have no kernel for aten::batch_norm_stats"):
        torch.batch_norm_stats(torch.ones(2, 3, 4, 4, device="npu"), 1e-5)


def test_a_fused_operator_without_a_kernel_names_itself(sim: object) -> None:
    import npu_debug.sim

    # No package offers this one.
    assert "npu_confusion_transpose" not in npu_debug.sim.registered()
    with pytest.raises(NotImplementedError, match=r"torch\.ops\.npu\.npu_confusion_transpose is a fused operator"):
        torch.ops.npu.npu_confusion_transpose(torch.ones(2, 3, device="npu"), [1, 0], [3, 2], True)


def test_an_operator_that_torch_npu_does_not_have_cannot_be_given_a_kernel(sim: object) -> None:
    import npu_debug.sim

    with pytest.raises(ValueError, match=r"torch_npu has no operator torch\.ops\.npu\.npu_nothing"):
        npu_debug.sim.register_kernel("npu_nothing", lambda x: x)


@pytest.fixture
def kernels(sim: object) -> Iterator[object]:
    """Registers kernels for a test, and puts back what was there."""
    import npu_debug.sim
    from npu_debug.simulation import fused

    before = dict(fused._registered)
    yield npu_debug.sim.register_kernel
    for name in set(fused._registered) - set(before):
        del fused._registered[name]
        fused._library.impl(name, fused._missing(name), "PrivateUse1", allow_override=True)
    for name, function in before.items():
        if fused._registered[name] is not function:
            npu_debug.sim.register_kernel(name, function)


@pytest.mark.parametrize(
    ("name", "function", "says"),
    [
        ("npu_swiglu", 3, "is of type int; give a function"),
        ("npu_swiglu", lambda x: x, "cannot be called as the operator: too many positional"),
        ("npu_swiglu", lambda x, dim=0: x, "has dim=0, and the operator dim=-1"),
        ("npu_swigl", lambda x, dim=-1: x, "Did you mean npu_swiglu"),
    ],
)
def test_a_kernel_that_cannot_be_one_is_refused(kernels: object, name: str, function: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kernels(name, function)


def test_a_kernel_that_returns_something_else_is_named(kernels: object) -> None:
    kernels("npu::npu_swiglu", lambda x, dim=-1: None)
    with pytest.raises(TypeError, match=r"npu_swiglu returned \(NoneType\); the operator returns \(Tensor\)"):
        torch.ops.npu.npu_swiglu(torch.ones(4, device="npu"))


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x * rstd * gamma).to(x.dtype), rstd


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    assert {t.device.type for t in (dy, x, gamma, rstd)} == {"cpu"}
    normal = x * rstd
    scaled = dy * gamma
    dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx, (dy * normal).flatten(0, -2).sum(0)


def test_a_registered_kernel_runs_under_the_autograd_of_torch_npu(kernels: object) -> None:
    kernels("npu_rms_norm", rms_norm)
    kernels("npu_rms_norm_backward", rms_norm_backward)
    x = torch.arange(24.0, device="npu").view(2, 3, 4).sin().requires_grad_()
    gamma = torch.arange(1.0, 5.0, device="npu").requires_grad_()
    upstream = torch.arange(24.0, device="npu").view(2, 3, 4).cos()
    y, rstd = torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)
    assert type(y.grad_fn).__name__ == "NpuRmsNormBackward0"
    y.backward(upstream)

    x64, gamma64 = (t.detach().cpu().double().requires_grad_() for t in (x, gamma))
    expected = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma64
    expected.backward(upstream.cpu().double())
    for actual, formula in ((y, expected), (x.grad, x64.grad), (gamma.grad, gamma64.grad)):
        assert actual.device == torch.device("npu:0")
        torch.testing.assert_close(actual.detach().cpu().double(), formula.detach(), rtol=1e-5, atol=1e-5)
    assert rstd.shape == (2, 3, 1)


def test_swiglu_through_its_python_function(kernels: object) -> None:
    import torch_npu

    def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        gate, up = x.chunk(2, dim)
        return F.silu(gate) * up

    def backward(dy: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        gate, up = x.chunk(2, dim)
        s = gate.sigmoid()
        return torch.cat([dy * up * s * (1 + gate * (1 - s)), dy * gate * s], dim)

    kernels("npu_swiglu", swiglu)
    kernels("npu_swiglu_backward", backward)
    x = torch.arange(12.0, device="npu").view(2, 6).sin().requires_grad_()
    torch_npu.npu_swiglu(x, dim=-1).sum().backward()
    x64 = x.detach().cpu().double().requires_grad_()
    gate, up = x64.chunk(2, -1)
    (gate * torch.sigmoid(gate) * up).sum().backward()
    torch.testing.assert_close(x.grad.cpu().double(), x64.grad, rtol=1e-6, atol=1e-6)


def test_a_registered_kernel_keeps_the_rules_of_devices(kernels: object) -> None:
    kernels("npu_rms_norm", rms_norm)
    with pytest.raises(RuntimeError, match=r"at least two devices.*npu::npu_rms_norm"):
        torch.ops.npu.npu_rms_norm(torch.ones(2, 3, device="npu"), torch.ones(3))
