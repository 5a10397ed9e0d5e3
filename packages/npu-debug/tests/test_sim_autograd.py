"""Autograd, mixed precision and optimizers on simulated devices.

Gradients and updated weights are the CPU's, bit for bit, or are compared with a formula.
"""

import copy
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="install npu-debug[sim] to run the tests on simulated devices")

from torch import nn  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.sim,
    # torch_npu says so, on real devices too, of a tensor made with the format "legacy contiguous", as gradcheck does.
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning"),
]


def numbers(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same irregular values on every call."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(7), dtype=torch.float32).to(dtype)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def on_both(function: Callable[[str], list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return function("cpu"), [t.cpu() for t in function("npu")]


def assert_same_bits(function: Callable[[str], list[torch.Tensor]]) -> None:
    expected, actual = on_both(function)
    assert len(expected) == len(actual) > 0
    for e, a in zip(expected, actual, strict=True):
        assert (e.dtype, e.size()) == (a.dtype, a.size())
        assert e.equal(a)


# Each on x of 3 x 4 x 4, values irregular.
FUNCTIONS = {
    "arithmetic": lambda x: (x * 2 - x / (x.abs() + 1)) ** 2,
    "pow": lambda x: x.abs() ** 1.5,
    "exp and log": lambda x: x.exp().log1p(),
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "glu": lambda x: F.glu(x, -1),
    "prelu": lambda x: F.prelu(x, x.detach()[0, 0, :1].abs()),
    "logsigmoid": F.logsigmoid,
    "softmax": lambda x: x.softmax(-1) ** 2,
    "log_softmax": lambda x: x.log_softmax(1) ** 2,
    "matmul": lambda x: x @ x.mT,
    "matmul with a vector": lambda x: x @ x[0, 0],
    "bmm": lambda x: torch.bmm(x, x),
    "einsum": lambda x: torch.einsum("bij,bkj->ik", x, x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)) ** 2,
    "rms_norm": lambda x: F.rms_norm(x, (4,)) ** 2,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True) ** 2,
    "group_norm": lambda x: F.group_norm(x, 2) ** 2,
    "conv1d": lambda x: F.conv1d(x, x, padding=1),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[:, :3], x),
    "conv2d": lambda x: F.conv2d(x[None], x[:2, None, :3, :3].expand(2, 3, 3, 3)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 1), mode="reflect") ** 2,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "attention, mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x.detach()[0] > 0.1),
    "attention, masks": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x.detach()),
    "attention, learned mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2, 2], device=x.device), x[0]) ** 2,
    "cross_entropy": lambda x: F.cross_entropy(x[0], torch.tensor([0, 1, 3, 2], device=x.device), label_smoothing=0.1),
    "nll_loss": lambda x: F.nll_loss(x[0].log_softmax(1), torch.tensor([0, 1, 3, 2], device=x.device)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() * 2),
    "l1_loss": lambda x: F.l1_loss(x, x.detach() * 2),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="sum"),
    "with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "sum and mean": lambda x: x.sum(1) * x.mean(1),
    "std": lambda x: x.std(1),
    "amax": lambda x: x.amax((0, 1)),
    "max": lambda x: x.max(1)[0],
    "median": lambda x: x.median(1)[0],
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "prod": lambda x: x.prod(1),
    "cumsum": lambda x: x.cumsum(1) ** 2,
    "cumprod": lambda x: x.cumprod(0),
    "norm": lambda x: x.norm(dim=1),
    "sort": lambda x: x.sort(1)[0] ** 2,
    "topk": lambda x: x.topk(2)[0] ** 2,
    "gather": lambda x: x.gather(1, x.detach().argsort(1)) ** 2,
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.detach().argsort(1), x) ** 2,
    "index": lambda x: x[:, [0, 2, 2], 1:] ** 2,
    "index_put": lambda x: x.clone().index_put((torch.tensor([0], device=x.device),), x[1]) ** 2,
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0, 1], device=x.device), x) ** 2,
    "masked_select": lambda x: x.masked_select(x > 0),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "cat and stack": lambda x: torch.stack([torch.cat([x, x * 2]), torch.cat([x * 3, x])]) ** 2,
    "views": lambda x: (x.transpose(0, 1)[1:].unfold(2, 2, 1).flatten() * x[0, 0, 0]).view(-1, 2),
    "in place": lambda x: (x * 1).mul_(x).add_(1).sigmoid_(),
    "in place on a view": lambda x: [(y := x * 1), y[0].mul_(2)][0] ** 2,
    "roll and flip": lambda x: x.roll(1, 0).flip(1) * x,
    "tril": lambda x: x.tril() ** 2,
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1) ** 2,
    "complex": lambda x: torch.view_as_complex(x.reshape(3, 4, 2, 2)).mul(1j).abs(),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "inverse": torch.linalg.inv,
    "cdist": lambda x: torch.cdist(x, x.flip(1)),
    "to another type": lambda x: x.double().sin().float(),
}


# The CPU has no bfloat16 for them.
WIDE = {"fft", "complex", "inverse", "cdist"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in FUNCTIONS] + [(name, torch.bfloat16) for name in FUNCTIONS if name not in WIDE],
    ids=str,
)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    def run(device: str) -> list[torch.Tensor]:
        x = numbers(3, 4, 4, dtype=dtype).to(device).requires_grad_()
        y = FUNCTIONS[name](x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert y.device == gradient.device == x.device
        return [y.detach(), gradient]

    assert_same_bits(run)


CHECKED = {
    "tanh": (torch.tanh, [(3,)]),
    "silu": (F.silu, [(3,)]),
    "mish": (F.mish, [(3,)]),
    "gelu": (F.gelu, [(3,)]),
    "mm": (torch.mm, [(2, 3), (3, 2)]),
    "matmul": (torch.matmul, [(2, 2, 3), (3, 2)]),
    "softmax": (lambda x: x.softmax(-1), [(2, 3)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), [(2, 3), (3,), (3,)]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(4, 3)]),
    "conv2d": (F.conv2d, [(1, 2, 4, 4), (2, 2, 3, 3), (2,)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [(1, 1, 4, 4)]),
    "embedding": (lambda w: F.embedding(torch.tensor([0, 1, 1], device=w.device), w), [(3, 2)]),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 2], device=x.device)), [(2, 3)]),
    "logsumexp": (lambda x: x.logsumexp(0), [(4,)]),
    "cumprod": (lambda x: x.cumprod(0), [(4,)]),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 1]], device=x.device)), [(2, 3)]),
    "index": (lambda x: x[torch.tensor([0, 0], device=x.device)], [(2, 3)]),
    "inverse": (torch.linalg.inv, [(2, 2)]),
}


@pytest.mark.parametrize("name", CHECKED)
def test_gradients_against_differences(name: str) -> None:
    function, sizes = CHECKED[name]
    arguments = [numbers(*size, dtype=torch.float64).to("npu").requires_grad_() for size in sizes]
    assert gradcheck(function, arguments)
    assert gradgradcheck(function, arguments)


def test_the_gradient_of_the_gradient_by_hand() -> None:
    x = torch.tensor([2.0, -1.0], device="npu", requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([12, 3], [12, -6], [6, 6])


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_flash_attention_has_no_second_derivative(device: str) -> None:
    x = numbers(1, 1, 3, 4).to(device).requires_grad_()
    (gradient,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not implemented"):
        gradient.sum().backward()


def test_a_function_of_ones_own() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * 3 * x**2

    x = torch.tensor([2.0, 3.0], device="npu", requires_grad=True)
    Cube.apply(x).sum().backward()
    assert x.grad.tolist() == [12, 27]
    assert gradgradcheck(Cube.apply, [numbers(3, dtype=torch.float64).to("npu").requires_grad_()])


def test_hooks() -> None:
    x = torch.tensor([1.0, 2.0], device="npu", requires_grad=True)
    y = x * 3
    seen: list[object] = []
    y.register_hook(lambda g: seen.append(("y", g.tolist())))
    x.register_hook(lambda g: g * 10)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(("x", p.grad.tolist())))
    (y * y).sum().backward()
    # d(9 x^2) = 18 x, ten times by the hook.
    assert seen == [("y", [6, 12]), ("x", [180, 360])]


def test_saved_tensors_hooks_offload_to_the_host() -> None:
    x = numbers(4, 4).to("npu").requires_grad_()
    (expected,) = torch.autograd.grad((x.exp() * x).sum(), x)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x.exp() * x).sum()
    (actual,) = torch.autograd.grad(y, x)
    assert actual.equal(expected)


def test_module_hooks_and_gradient_buffers() -> None:
    layer = nn.Linear(2, 1, bias=False).to("npu")
    nn.init.constant_(layer.weight, 2.0)
    seen: list[object] = []
    layer.register_forward_hook(lambda module, args, out: seen.append(out.item()))
    layer.register_full_backward_hook(lambda module, into, out: seen.append(into[0].tolist()))
    x = torch.tensor([[1.0, 3.0]], device="npu", requires_grad=True)
    layer(x).backward()
    layer(x).backward()
    assert seen == [8, [[2, 2]], 8, [[2, 2]]]
    assert layer.weight.grad.tolist() == [[2, 6]]


def test_what_was_changed_in_place_is_refused() -> None:
    x = torch.ones(2, device="npu", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)


def test_the_backward_of_two_devices() -> None:
    a = torch.tensor([2.0], device="npu:0", requires_grad=True)
    b = torch.tensor([3.0], device="npu:1", requires_grad=True)
    (a.to("npu:1") * b).to("cpu").backward()
    assert (a.grad.item(), str(a.grad.device), b.grad.item(), str(b.grad.device)) == (3, "npu:0", 2, "npu:1")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_again(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)).to("npu")

    def gradients(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = numbers(4, 6).to("npu").requires_grad_()
        block.zero_grad()
        torch.manual_seed(3)
        torch.npu.manual_seed(3)
        call(x).square().sum().backward()
        return [x.grad, *(p.grad for p in block.parameters())]

    plain = gradients(block)
    again = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    assert all(a.equal(b) for a, b in zip(plain, again, strict=True))
    # Half of the 64 x 4 were dropped: other draws would show.
    assert not gradients(lambda x: block(x + torch.rand_like(x) * 0))[0].equal(plain[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_chooses_types(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 4).to("npu"), numbers(2, 4).to("npu")
    with torch.autocast("npu", dtype):
        y = layer(x)
        assert torch.is_autocast_enabled("npu")
        assert torch.get_autocast_dtype("npu") == dtype
        assert (y.dtype, (y @ y.t()).dtype) == (dtype, dtype)
        assert {y.softmax(1).dtype, F.layer_norm(y, (4,)).dtype, y.sum().dtype, F.mse_loss(y, y).dtype} == {
            torch.float32
        }
        with torch.autocast("npu", enabled=False):
            assert layer(x).dtype == torch.float32
    assert not torch.is_autocast_enabled("npu")
    half = F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
    assert half.equal(y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_under_autocast_are_those_of_explicit_casts(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 3).to("npu")
    x = numbers(2, 4).to("npu")
    with torch.autocast("npu", dtype):
        layer(x).float().square().sum().backward()
    w, b = (p.detach().cpu().requires_grad_() for p in (layer.weight, layer.bias))
    F.linear(x.cpu().to(dtype), w.to(dtype), b.to(dtype)).float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.cpu().equal(w.grad)
    assert layer.bias.grad.cpu().equal(b.grad)


def test_the_gradient_scaler_skips_a_step_that_is_not_finite() -> None:
    layer = nn.Linear(2, 1, bias=False).to("npu")
    nn.init.constant_(layer.weight, 1.0)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    scaler = torch.amp.GradScaler("npu", init_scale=4.0, growth_interval=1)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(layer(torch.tensor([[1.0, 2.0]], device="npu")).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    # The gradient is the input; the scale was divided out and then doubled.
    assert (layer.weight.tolist(), scaler.get_scale()) == ([[0.5, 0.0]], 8.0)
    step(float("inf"))
    assert (layer.weight.tolist(), scaler.get_scale()) == ([[0.5, 0.0]], 4.0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)


WAYS = {"default": {}, "single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS = {
    "SGD": lambda p, **way: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **way),
    "Adam": lambda p, **way: torch.optim.Adam(p, 0.1, **way),
    "AdamW": lambda p, **way: torch.optim.AdamW(p, 0.1, **way),
    "AdamW, amsgrad": lambda p, **way: torch.optim.AdamW(p, 0.1, amsgrad=True, **way),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, way: str) -> None:
    def train(device: str) -> list[torch.Tensor]:
        net = model().to(device)
        # On the CPU the default is the single way, on devices foreach.
        chosen = {"foreach": True} if (way, device) == ("default", "cpu") else WAYS[way]
        optimizer = OPTIMIZERS[name](net.parameters(), **chosen)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            net(numbers(5, 6).to(device)).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()
        return [*norms, *(p.detach() for p in net.parameters())]

    assert_same_bits(train)


def test_adamw_against_its_formula() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0], device="npu", dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    value, m, v = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for t in range(1, 4):
        optimizer.zero_grad()
        (p**2).sum().backward()
        optimizer.step()
        for i in range(2):
            gradient = 2 * value[i]
            m[i] = 0.9 * m[i] + 0.1 * gradient
            v[i] = 0.99 * v[i] + 0.01 * gradient**2
            value[i] *= 1 - 0.1 * 0.1
            value[i] -= 0.1 * (m[i] / (1 - 0.9**t)) / ((v[i] / (1 - 0.99**t)) ** 0.5 + 1e-8)
    assert p.tolist() == pytest.approx(value, rel=1e-12)


# torch_npu says so for every deep-copied storage.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_an_optimizer_resumes_from_its_state() -> None:
    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(numbers(5, 6).to("npu")).square().mean().backward()
        optimizer.step()

    net = model().to("npu")
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    step(net, optimizer)
    resumed = model().to("npu")
    resumed.load_state_dict(copy.deepcopy(net.state_dict()))
    other = torch.optim.AdamW(resumed.parameters(), 0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(net, optimizer)
    step(resumed, other)
    assert all(a.equal(b) for a, b in zip(net.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_hand(foreach: bool) -> None:
    a, b = (nn.Parameter(torch.zeros(n, device="npu")) for n in (1, 2))
    a.grad, b.grad = torch.tensor([3.0], device="npu"), torch.tensor([0.0, 4.0], device="npu")
    norm = nn.utils.clip_grad_norm_([a, b], 1.0, foreach=foreach)
    assert norm.item() == 5
    assert [*a.grad.tolist(), *b.grad.tolist()] == pytest.approx([0.6, 0.0, 0.8], abs=1e-6)
    nn.utils.clip_grad_value_([a, b], 0.5, foreach=foreach)
    assert [*a.grad.tolist(), *b.grad.tolist()] == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(6, 4, 2),
        lambda: nn.GRU(6, 4),
        lambda: nn.RNN(6, 4),
        lambda: nn.TransformerEncoderLayer(6, 2, 16, 0.0),
    ],
    ids=["LSTM", "GRU", "RNN", "TransformerEncoderLayer"],
)
def test_modules(build: Callable[[], nn.Module]) -> None:
    """Close, not equal: for these the CPU has fused kernels of its own, which devices do not use."""
    module = build()

    def run(device: str) -> list[torch.Tensor]:
        own = build()
        own.load_state_dict(module.state_dict())
        own.to(device)
        x = numbers(3, 2, 6).to(device).requires_grad_()
        y = own(x)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in own.parameters())]

    for e, a in zip(*on_both(run), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_func_grad_and_vjp() -> None:
    x = numbers(3, 4).to("npu")
    assert torch.func.grad(lambda t: t.sin().sum())(x).equal(x.cos())
    value, pullback = torch.func.vjp(torch.sin, x)
    assert value.equal(x.sin())
    assert pullback(torch.ones_like(x))[0].equal(x.cos())


def test_func_vmap() -> None:
    x, w = numbers(3, 4).to("npu"), numbers(5, 4).to("npu")
    torch.testing.assert_close(torch.func.vmap(torch.dot)(x, x).cpu(), (x.cpu() ** 2).sum(1))
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: F.linear(x, w).square().sum()), (None, 0))(w, x)
    # d/dw of (w x)^2 summed = 2 (w x) x^T.
    expected = torch.stack([2 * torch.outer(w.cpu().double() @ row, row) for row in x.cpu().double()])
    torch.testing.assert_close(per_sample.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_func_jacobian_and_hessian() -> None:
    x = torch.tensor([1.0, 2.0], device="npu")
    assert torch.func.jacrev(lambda t: t**2)(x).tolist() == [[2, 0], [0, 4]]
    hessian = torch.func.jacrev(torch.func.grad(lambda t: (t**3).sum()))(x)
    assert hessian.tolist() == [[6, 0], [0, 12]]


# Forward-mode AD registers scripted functions when it is first used.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:FutureWarning")
def test_func_jvp() -> None:
    x = numbers(3).to("npu")
    value, tangent = torch.func.jvp(torch.sin, (x,), (x,))
    assert value.equal(x.sin())
    assert tangent.equal(x.cos() * x)


def test_functional_call_does_not_touch_the_module() -> None:
    net = model().to("npu")
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    assert torch.func.functional_call(net, zeros, numbers(2, 6).to("npu")).abs().sum().item() == 0
    assert net(numbers(2, 6).to("npu")).abs().sum().item() > 0
