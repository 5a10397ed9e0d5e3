"""What PyTorch promises about tensors of any device, on simulated devices.

Expected values are the CPU's (the same kernel must give the same bits), or worked out by hand.
"""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="install npu-debug[sim] to run the tests on simulated devices")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

pytestmark = pytest.mark.sim

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
TWO_DEVICES = "Expected all tensors to be on the same device"


def numbers(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same irregular values on every call."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(7), dtype=torch.float32).to(dtype)


def parts(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [p for item in result for p in parts(item)]


def assert_as_on_cpu(function: Callable[[str], object]) -> None:
    """`function` builds its tensors on the given device; values, sizes, strides and types are those of the CPU."""
    expected, actual = parts(function("cpu")), parts(function("npu"))
    assert len(expected) == len(actual) > 0
    for e, a in zip(expected, actual, strict=True):
        assert a.device == torch.device("npu", 0)
        assert (a.dtype, a.size(), a.stride()) == (e.dtype, e.size(), e.stride())
        assert a.cpu().resolve_conj().resolve_neg().equal(e.resolve_conj().resolve_neg())


def x46(device: str) -> torch.Tensor:
    return numbers(4, 6).to(device)


def indices(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=device)


FACTORIES = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, 3, device=d, dtype=torch.int32),
    "full": lambda d: torch.full((2,), 3.5, device=d),
    "arange": lambda d: torch.arange(1, 10, 2, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 7, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 5, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 4, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "scalar": lambda d: torch.tensor(2.5, device=d, dtype=torch.float64),
    "no elements": lambda d: torch.zeros(0, 3, device=d) + 1,
    "zeros_like": lambda d: torch.zeros_like(x46(d).t()),
    "new_full": lambda d: x46(d).new_full((2, 2), 7.0),
    "complex": lambda d: torch.complex(x46(d), x46(d)),
    "vander": lambda d: torch.vander(torch.tensor([1.0, 2.0, 3.0], device=d)),
    "meshgrid": lambda d: torch.meshgrid(torch.arange(3, device=d), torch.arange(2, device=d), indexing="ij"),
    "hann_window": lambda d: torch.hann_window(5, device=d),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str) -> None:
    assert_as_on_cpu(FACTORIES[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arithmetic_of_every_dtype(dtype: torch.dtype) -> None:
    a = torch.tensor([1, 0, 1, 3], dtype=dtype, device="npu")
    b = torch.tensor([1, 1, 0, 2], dtype=dtype, device="npu")
    total, product = (a + b, a * b)
    assert total.dtype == product.dtype == dtype
    as_dtype = {torch.bool: bool}.get(dtype, complex if dtype.is_complex else float)
    assert total.tolist() == [as_dtype(v) for v in (2, 1, 1, 5)]
    assert product.tolist() == [as_dtype(v) for v in (1, 0, 0, 6)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conversion_of_every_dtype(dtype: torch.dtype) -> None:
    source = torch.tensor([0, 1, 1], device="npu")
    converted = source.to(dtype)
    assert converted.dtype == dtype
    assert converted.cpu().equal(torch.tensor([0, 1, 1], dtype=dtype))
    assert converted.real.to("cpu", torch.int64).tolist() == [0, 1, 1]


def test_float8_is_stored_and_converted_but_not_added() -> None:
    x = torch.tensor([1.0, 0.3], device="npu").to(torch.float8_e4m3fn)
    assert x.float().tolist() == [1.0, 0.3125]  # 0.3 = 1.2 / 4; three bits of mantissa give 1.25 / 4
    with pytest.raises(NotImplementedError, match="Float8_e4m3fn"):
        x + x


INDEXING = {
    "numbers and slices": lambda d: (x46(d)[1], x46(d)[1, 2], x46(d)[1:, ::2], x46(d)[..., None, -1]),
    "lists": lambda d: x46(d)[[0, 2], [1, 5]],
    "broadcast": lambda d: x46(d)[indices(d, 0, 2)[:, None], indices(d, 1, 3)],
    "tensor between slices": lambda d: x46(d)[1:3, indices(d, 5, 0, 0)],
    "mask": lambda d: x46(d)[x46(d) > 0],
    "mask of rows": lambda d: x46(d)[torch.tensor([True, False, True, False], device=d)],
    "indices on the host": lambda d: x46(d)[torch.tensor([0, 1])],
    "negative": lambda d: x46(d)[indices(d, -1)],
    "take": lambda d: x46(d).take(indices(d, 0, 23)),
    "take_along_dim": lambda d: x46(d).take_along_dim(x46(d).argsort(1), 1),
    "index_select": lambda d: x46(d).index_select(1, indices(d, 3, 0)),
    "gather": lambda d: x46(d).gather(1, torch.tensor([[0, 5], [1, 1]], device=d)),
    "diagonal": lambda d: x46(d).diagonal(1),
    "narrow": lambda d: x46(d).narrow(1, 2, 3),
    "unfold": lambda d: x46(d).unfold(1, 3, 2),
    "masked_select": lambda d: x46(d).masked_select(x46(d).abs() < 0.5),
    "where": lambda d: torch.where(x46(d) > 0, x46(d), 0.0),
    "repeat_interleave": lambda d: torch.repeat_interleave(indices(d, 0, 1, 2), indices(d, 2, 0, 3)),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name: str) -> None:
    assert_as_on_cpu(INDEXING[name])


def _set(index: Callable[[str], object], value: Callable[[str], object]) -> Callable[[str], torch.Tensor]:
    def function(device: str) -> torch.Tensor:
        x = x46(device)
        x[index(device)] = value(device)
        return x

    return function


WRITING = {
    "slice": _set(lambda d: (slice(1, 3), slice(None, None, 2)), lambda d: 7.0),
    "mask": _set(lambda d: x46(d) > 0, lambda d: 7.0),
    "indices": _set(lambda d: indices(d, 0, 3), lambda d: torch.ones(6, device=d)),
    "number from the host": _set(lambda d: indices(d, 0, 3), lambda d: torch.tensor(2.0)),
    "index_put": lambda d: x46(d).index_put((indices(d, 0, 1), indices(d, 5, 0)), torch.tensor([8.0, 9.0], device=d)),
    "index_put, accumulated": lambda d: x46(d).index_put_(
        (indices(d, 0, 0), indices(d, 1, 1)), torch.tensor([1.0, 2.0], device=d), accumulate=True
    ),
    "index_add": lambda d: x46(d).index_add_(0, indices(d, 0, 0), torch.ones(2, 6, device=d), alpha=2),
    "index_copy": lambda d: x46(d).index_copy(1, indices(d, 5, 0), torch.ones(4, 2, device=d)),
    "index_fill": lambda d: x46(d).index_fill_(1, indices(d, 2), 3.0),
    "put": lambda d: x46(d).put_(indices(d, 0, 23), torch.tensor([1.0, 2.0], device=d)),
    "scatter": lambda d: torch.zeros(3, 5, device=d).scatter_(
        0, torch.tensor([[0, 1, 2, 0, 0]], device=d), torch.arange(5.0, device=d)[None]
    ),
    "scatter_add": lambda d: torch.zeros(3, device=d).scatter_add_(
        0, indices(d, 0, 1, 0), torch.tensor([1.0, 2.0, 4.0], device=d)
    ),
    "scatter_reduce": lambda d: torch.ones(3, device=d).scatter_reduce(
        0, indices(d, 0, 1, 0), torch.tensor([1.0, 2.0, 4.0], device=d), "mean"
    ),
    "masked_fill": lambda d: x46(d).masked_fill_(x46(d) > 0, torch.tensor(3.0)),
    "masked_scatter": lambda d: x46(d).masked_scatter_(x46(d) > 0, torch.arange(24.0, device=d)),
    "fill_diagonal": lambda d: x46(d).fill_diagonal_(9.0),
    "into a strided view": lambda d: [(x := x46(d)).t()[::2].copy_(torch.arange(12.0, device=d).view(3, 4)), x],
    "copy from another type": lambda d: x46(d).copy_(torch.arange(6, device=d)),
    "clamp": lambda d: x46(d).clamp_(-0.5, 0.5),
    "zero": lambda d: x46(d).zero_(),
}


@pytest.mark.parametrize("name", WRITING)
def test_writing(name: str) -> None:
    assert_as_on_cpu(WRITING[name])


VIEWS = {
    "transposed": lambda d: x46(d).t() * 2,
    "permuted": lambda d: numbers(2, 3, 4).to(d).permute(2, 0, 1).exp(),
    "expanded": lambda d: x46(d)[:1].expand(3, 6) + 1,
    "every second": lambda d: x46(d)[::2, 1::2].sigmoid(),
    "with an offset": lambda d: x46(d)[2:].cumsum(1),
    "reshaped": lambda d: x46(d).t().reshape(3, 8),
    "as_strided": lambda d: x46(d).as_strided((2, 3), (1, 2), 4),
    "flattened": lambda d: x46(d).t().flatten(),
    "split": lambda d: x46(d).split([1, 3]),
    "chunk": lambda d: x46(d).t().chunk(2),
    "unbind": lambda d: x46(d).unbind(1),
    "bytes": lambda d: x46(d).view(torch.int32),
    "squeeze_": lambda d: numbers(1, 4, 1).to(d).squeeze_(0).unsqueeze_(1).transpose_(0, 2),
    "real and imaginary": lambda d: [(z := torch.view_as_complex(x46(d).view(4, 3, 2))).real, z.imag],
    "conjugate": lambda d: torch.view_as_complex(x46(d).view(4, 3, 2)).conj() * 1j,
    "imaginary part of a conjugate": lambda d: torch.view_as_complex(x46(d).view(4, 3, 2)).conj().imag + 1,
    "contiguous": lambda d: x46(d).t().contiguous(),
    "clone keeps strides": lambda d: x46(d).t().clone(),
    "channels_last": lambda d: numbers(2, 3, 4, 5).to(d).to(memory_format=torch.channels_last) + 1,
    "rolled": lambda d: x46(d).roll((1, 2), (0, 1)),
    "flipped": lambda d: x46(d).flip(0, 1),
    "movedim": lambda d: numbers(2, 3, 4).to(d).movedim(0, 2).contiguous(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_and_strides(name: str) -> None:
    assert_as_on_cpu(VIEWS[name])


def test_a_view_shares_memory_and_counts_versions() -> None:
    x = torch.zeros(2, 3, device="npu")
    view = x.t()[1]
    view += 5
    assert x.tolist() == [[0, 5, 0], [0, 5, 0]]
    assert (view.data_ptr() - x.data_ptr(), view._base is x, x._version) == (4, True, 1)


COMPUTING = {
    "promotion": lambda d: indices(d, 1, 2) + torch.tensor([0.5, 1.5], device=d, dtype=torch.float16),
    "integer division": lambda d: (indices(d, -7, 7) // 2, indices(d, -7, 7) % 3, indices(d, 1, 2) / 2),
    "cat": lambda d: torch.cat([x46(d), x46(d)[:1], torch.ones(1, 6, device=d, dtype=torch.float64)]),
    "stack": lambda d: torch.stack([x46(d), x46(d) + 1], 1),
    "block_diag": lambda d: torch.block_diag(x46(d), x46(d)),
    "nonzero": lambda d: torch.nonzero(x46(d) > 0.5),
    "nonzero as tuple": lambda d: torch.nonzero(x46(d) > 0.5, as_tuple=True),
    "unique": lambda d: torch.unique(x46(d).round(), return_inverse=True, return_counts=True),
    "unique of rows": lambda d: torch.unique(indices(d, 3, 1, 3, 1).view(2, 2), dim=0),
    "unique_consecutive": lambda d: torch.unique_consecutive(indices(d, 1, 1, 2, 1)),
    "bincount": lambda d: torch.bincount(indices(d, 0, 3, 3)),
    "histc": lambda d: torch.histc(x46(d), 5, -1, 1),
    "sort": lambda d: torch.sort(x46(d), 1, descending=True),
    "stable sort": lambda d: torch.sort(indices(d, 1, 0, 1, 0), stable=True),
    "argsort": lambda d: torch.argsort(x46(d).t(), 0),
    "topk": lambda d: torch.topk(x46(d), 3),
    "kthvalue": lambda d: torch.kthvalue(x46(d), 2),
    "median": lambda d: torch.median(x46(d), 1),
    "searchsorted": lambda d: torch.searchsorted(torch.arange(5.0, device=d), x46(d)),
    "cummax": lambda d: x46(d).cummax(1),
    "quantile": lambda d: torch.quantile(x46(d), 0.3),
    "quantiles": lambda d: torch.quantile(x46(d), torch.tensor([0.25, 0.5], device=d), dim=1, keepdim=True),
    "sum": lambda d: (x46(d).sum(), x46(d).sum(1), x46(d).sum((0, 1), keepdim=True), x46(d).half().sum()),
    "mean": lambda d: (x46(d).mean(0), x46(d).bfloat16().mean()),
    "products": lambda d: (x46(d).prod(1), x46(d).cumprod(0)),
    "variance": lambda d: (x46(d).std(), x46(d).var(1, correction=0), *torch.var_mean(x46(d))),
    "extremes": lambda d: (x46(d).amax(1), x46(d).argmin(), *x46(d).max(0), *torch.aminmax(x46(d))),
    "logsumexp": lambda d: x46(d).logsumexp(1),
    "norms": lambda d: (x46(d).norm(), torch.linalg.vector_norm(x46(d), 1, dim=1)),
    "logic": lambda d: ((x46(d) > 0).all(1), (x46(d) > 0).any(), torch.isfinite(x46(d)), torch.isclose(x46(d), x46(d))),
    "not a number": lambda d: (torch.tensor([1.0, float("nan")], device=d).nansum(), x46(d).log().nan_to_num()),
    "foreach": lambda d: (*torch._foreach_add([x46(d), x46(d).t()], 1), *torch._foreach_norm([x46(d), x46(d)])),
    "foreach in place": lambda d: (ts := [x46(d), x46(d).double()], torch._foreach_mul_(ts, torch.tensor(2.0)))[0],
    "mm": lambda d: (x46(d) @ x46(d).t(), x46(d) @ x46(d)[0], x46(d).half() @ x46(d).t().half()),
    "bmm": lambda d: torch.bmm(numbers(2, 3, 4).to(d), numbers(2, 4, 3).to(d)),
    "baddbmm": lambda d: torch.baddbmm(numbers(3).to(d), numbers(2, 3, 4).to(d), numbers(2, 4, 3).to(d), beta=2),
    "addmm": lambda d: torch.addmm(x46(d)[:, :4], x46(d), x46(d).t(), alpha=0.5),
    "einsum": lambda d: torch.einsum("bij,bkj->bik", numbers(2, 3, 4).to(d), numbers(2, 5, 4).to(d)),
    "integer mm": lambda d: (x := torch.arange(6, device=d).view(2, 3)) @ x.t(),
    "complex mm": lambda d: (z := torch.view_as_complex(numbers(3, 3, 2).to(d))) @ z.mH,
    "qr": lambda d: torch.linalg.qr(numbers(4, 4).to(d)),
    "svd": lambda d: torch.linalg.svd(numbers(4, 3).to(d)),
    "cdist": lambda d: torch.cdist(x46(d), x46(d)[:2]),
    "fft": lambda d: (torch.fft.rfft(x46(d)), torch.fft.fft2(x46(d))),
    "bitwise": lambda d: (indices(d, 5, 6) & 3, indices(d, 5) << 2, ~indices(d, 5), indices(d, 5).bitwise_xor(1)),
    "lerp": lambda d: torch.lerp(x46(d), x46(d) * 2, 0.3),
    "addcdiv": lambda d: torch.addcdiv(x46(d), x46(d), x46(d).abs() + 1, value=0.1),
}


@pytest.mark.parametrize("name", COMPUTING)
def test_computing(name: str) -> None:
    assert_as_on_cpu(COMPUTING[name])


@pytest.mark.parametrize("name", ["det", "inv", "cholesky", "eigh", "solve"])
def test_linear_algebra_by_the_host(name: str) -> None:
    """torch_npu 2.14 has no kernel for these: its own fallback computes them on the host, and the result comes back."""
    a = numbers(4, 4, dtype=torch.float64)
    a = a @ a.t() + 4 * torch.eye(4, dtype=torch.float64)
    function = getattr(torch.linalg, name)
    more = (torch.ones(4, 1, dtype=torch.float64),) if name == "solve" else ()
    expected = parts(function(a, *more))
    for e, actual in zip(expected, parts(function(a.to("npu"), *(m.to("npu") for m in more))), strict=True):
        assert actual.device.type == "npu"
        torch.testing.assert_close(actual.cpu(), e, rtol=1e-12, atol=1e-12)


IMAGE = (2, 3, 8, 8)
LAYERS = {
    "conv1d": lambda d: F.conv1d(numbers(2, 4, 9).to(d), numbers(6, 2, 3).to(d), numbers(6).to(d), groups=2),
    "conv2d": lambda d: F.conv2d(numbers(*IMAGE).to(d), numbers(4, 3, 3, 3).to(d), stride=2, padding=1, dilation=2),
    "conv2d in bfloat16": lambda d: F.conv2d(numbers(*IMAGE).to(d).bfloat16(), numbers(4, 3, 3, 3).to(d).bfloat16()),
    "conv3d": lambda d: F.conv3d(numbers(1, 2, 4, 4, 4).to(d), numbers(3, 2, 3, 3, 3).to(d), padding="same"),
    "conv_transpose2d": lambda d: F.conv_transpose2d(
        numbers(*IMAGE).to(d), numbers(3, 4, 3, 3).to(d), numbers(4).to(d), stride=2, output_padding=1
    ),
    "max_pool2d": lambda d: F.max_pool2d(numbers(*IMAGE).to(d), 2, return_indices=True),
    "avg_pool2d": lambda d: F.avg_pool2d(numbers(*IMAGE).to(d), 3, 1, 1),
    "adaptive_avg_pool2d": lambda d: F.adaptive_avg_pool2d(numbers(*IMAGE).to(d), (3, 1)),
    "interpolate": lambda d: F.interpolate(numbers(*IMAGE).to(d), scale_factor=2, mode="bilinear"),
    "pad": lambda d: F.pad(numbers(*IMAGE).to(d), (1, 1, 2, 0), mode="reflect"),
    "batch_norm": lambda d: F.batch_norm(numbers(*IMAGE).to(d), torch.zeros(3, device=d), torch.ones(3, device=d)),
    "group_norm": lambda d: F.group_norm(numbers(*IMAGE).to(d), 3),
    "layer_norm": lambda d: F.layer_norm(x46(d), (6,), torch.ones(6, device=d)),
    "rms_norm": lambda d: F.rms_norm(x46(d), (6,)),
    "linear": lambda d: F.linear(x46(d), numbers(5, 6).to(d), numbers(5).to(d)),
    "embedding": lambda d: F.embedding(indices(d, 3, 0, 3), x46(d), padding_idx=0),
    "embedding_bag": lambda d: F.embedding_bag(indices(d, 3, 0, 3), x46(d), indices(d, 0, 2)),
    "one_hot": lambda d: F.one_hot(indices(d, 1, 3), 4),
    "activations": lambda d: [f(x46(d)) for f in (F.relu, F.gelu, F.silu, F.mish, F.softplus, F.elu, F.hardswish)],
    "softmax": lambda d: (x46(d).softmax(1), x46(d).log_softmax(0), x46(d).softmax(1, dtype=torch.float64)),
    "attention": lambda d: F.scaled_dot_product_attention(*[numbers(2, 2, 5, 8).to(d)] * 3, is_causal=True),
    "attention with a mask": lambda d: F.scaled_dot_product_attention(
        *[numbers(2, 2, 5, 8).to(d)] * 3, attn_mask=torch.ones(5, 5, device=d).tril().bool()
    ),
    "attention with grouped queries": lambda d: F.scaled_dot_product_attention(
        numbers(1, 4, 5, 8).to(d), numbers(1, 2, 5, 8).to(d), numbers(1, 2, 5, 8).to(d), enable_gqa=True
    ),
}
LOSSES = {
    "cross_entropy": lambda x, c: F.cross_entropy(x, c, label_smoothing=0.1, ignore_index=0),
    "cross_entropy of probabilities": lambda x, c: F.cross_entropy(x, torch.full_like(x, 1 / 6)),
    "nll_loss": lambda x, c: F.nll_loss(x, c, reduction="none"),
    "mse_loss": lambda x, c: F.mse_loss(x, x * 2),
    "l1_loss": lambda x, c: F.l1_loss(x, x * 2),
    "smooth_l1_loss": lambda x, c: F.smooth_l1_loss(x, x * 2),
    "binary_cross_entropy": lambda x, c: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "with logits": lambda x, c: F.binary_cross_entropy_with_logits(x, x.round().clamp(0, 1), pos_weight=x[0].exp()),
    "kl_div": lambda x, c: F.kl_div(x.log_softmax(1), x.softmax(0), reduction="batchmean"),
    "cosine_embedding_loss": lambda x, c: F.cosine_embedding_loss(x, x.flip(0), torch.ones_like(x[:, 0])),
    "triplet_margin_loss": lambda x, c: F.triplet_margin_loss(x, x * 2, x * 3),
    "ctc_loss": lambda x, c: F.ctc_loss(
        x.log_softmax(1)[:, None], c[None, 1:3] + 1, torch.tensor([4]), torch.tensor([2])
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    assert_as_on_cpu(LAYERS[name])


# torch_npu says so, on real devices too, of a tensor made with the format "legacy contiguous".
@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    assert_as_on_cpu(lambda device: LOSSES[name](x46(device), indices(device, 0, 1, 2, 5)))


def test_batch_norm_updates_its_running_statistics() -> None:
    norm = nn.BatchNorm1d(2).to("npu")
    norm(torch.tensor([[1.0, 10.0], [3.0, 30.0]], device="npu"))
    # Momentum 0.1 from 0 and 1; means 2 and 20; unbiased variances 2 and 200.
    torch.testing.assert_close(norm.running_mean.cpu(), torch.tensor([0.2, 2.0]))
    torch.testing.assert_close(norm.running_var.cpu(), torch.tensor([1.1, 20.9]))
    assert norm.num_batches_tracked.item() == 1


OUT = {
    "same size": lambda d: torch.add(x46(d), 1, out=torch.empty(4, 6, device=d)),
    "empty": lambda d: torch.add(x46(d), 1, out=torch.empty(0, device=d)),
    "strided": lambda d: torch.mul(x46(d), 2, out=torch.zeros(6, 4, device=d).t()),
    "part of another": lambda d: [(b := torch.zeros(8, 6, device=d)), torch.mul(x46(d), 2, out=b[::2])],
    "wider type": lambda d: torch.sum(x46(d), 1, out=torch.empty(4, device=d, dtype=torch.float64)),
    "mm": lambda d: torch.mm(x46(d), x46(d).t(), out=torch.empty(0, device=d)),
    "cat": lambda d: torch.cat([x46(d), x46(d)], out=torch.empty(0, device=d)),
    "two results": lambda d: torch.max(
        x46(d), 1, out=(torch.empty(0, device=d), torch.empty(0, device=d, dtype=torch.int64))
    ),
    "data-dependent": lambda d: torch.masked_select(x46(d), x46(d) > 0, out=torch.empty(0, device=d)),
    "positions": lambda d: torch.nonzero(x46(d) > 0, out=torch.empty(0, device=d, dtype=torch.int64)),
    "arange": lambda d: torch.arange(4, out=torch.empty(0, device=d, dtype=torch.int64)),
    "smaller, in the layout of the CPU": lambda d: torch.linalg.qr(
        numbers(4, 4).to(d), out=(torch.empty(0, device=d), torch.empty(0, device=d))
    ),
    "a list": lambda d: [
        (outs := [torch.empty(0, device=d), torch.empty(0, device=d)]),
        torch.split_with_sizes_copy(x46(d), [1, 3], out=outs) or [],
    ],
    "onto an argument": lambda d: [(x := x46(d)), torch.exp(x, out=x)],
}


@pytest.mark.parametrize("name", OUT)
def test_out(name: str) -> None:
    assert_as_on_cpu(OUT[name])


def test_out_is_what_is_returned_and_grows_with_one_warning() -> None:
    out = torch.empty(3, device="npu")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized") as caught:
        returned = torch.add(x46("npu"), 1, out=out)
    assert returned is out
    assert len(caught) == 1
    assert out.cpu().equal(x46("cpu") + 1)


def test_an_argument_does_not_grow() -> None:
    for function in (torch.Tensor.ldexp_, torch.Tensor.logical_xor_, lambda x, y: torch.add(x, y, out=x)):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            function(torch.ones(4, 1, device="npu"), x46("npu"))


def test_an_out_that_is_too_large_shrinks() -> None:
    q, r = torch.empty(30, device="npu"), torch.empty(0, device="npu")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.linalg.qr(numbers(4, 4).to("npu"), out=(q, r))
    expected = torch.linalg.qr(numbers(4, 4))
    assert q.cpu().equal(expected.Q)
    assert r.cpu().equal(expected.R)


def test_out_of_random_functions_grows() -> None:
    where = torch.empty(0, device="npu")
    assert torch.bernoulli(torch.ones(4, device="npu"), out=where).tolist() == [1, 1, 1, 1]
    order = torch.empty(0, device="npu", dtype=torch.int64)
    torch.randperm(5, device="npu", out=order)
    assert sorted(order.tolist()) == [0, 1, 2, 3, 4]


def test_out_of_a_narrower_type_is_refused() -> None:
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Int"):
        torch.add(x46("npu"), 1, out=torch.empty(4, 6, device="npu", dtype=torch.int32))


def test_resizing_keeps_the_values() -> None:
    x = torch.arange(3.0, device="npu")
    x.resize_(2, 3)
    assert (x.shape, x[0].tolist()) == ((2, 3), [0, 1, 2])
    assert x.resize_(2).tolist() == [0, 1]


TWO = {
    "add": lambda x, y: x + y,
    "in place": lambda x, y: x.add_(y),
    "in place on the other": lambda x, y: y.add_(x),
    "mm": lambda x, y: x @ y.t(),
    "linear": F.linear,
    "cat": lambda x, y: torch.cat([x, y]),
    "cat, the other first": lambda x, y: torch.cat([y, x]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "out": lambda x, y: torch.add(x, 1, out=y),
    "loss": F.mse_loss,
    "layer_norm": lambda x, y: F.layer_norm(x, (6,), y[0]),
    "conv": lambda x, y: F.conv1d(x[None], y[:, :4, None]),
    "index_add": lambda x, y: x.index_add_(0, torch.zeros(4, dtype=torch.int64, device="npu"), y),
    "values of index_put": lambda x, y: x.index_put_((torch.arange(4, device="npu"),), y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
}


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
@pytest.mark.parametrize("name", TWO)
def test_tensors_of_two_devices_are_refused(name: str, other: str) -> None:
    with pytest.raises(RuntimeError, match=f"{TWO_DEVICES}|should be the same|same device"):
        TWO[name](x46("npu"), numbers(4, 6).to(other))


def test_a_list_on_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        torch._foreach_add([x46("npu")], [x46("cpu")])


def test_a_number_on_the_host_is_accepted_and_one_on_another_device_is_not() -> None:
    x, two = torch.ones(3, device="npu"), torch.tensor(2.0)
    for result in (x + two, two + x, torch.maximum(x, two), torch.where(x > 0, two, x) * 1, x.clone().mul_(two)):
        assert result.device.type == "npu"
        assert set(result.tolist()) <= {2.0, 3.0}
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        x + torch.ones((), device="npu:1")
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        torch.ones((), device="npu:1") + x


def test_indices_of_another_device_are_refused() -> None:
    index = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"same device as the indexed tensor \(npu:0\)"):
        x46("npu")[index.to("npu:1")]
    with pytest.raises(RuntimeError, match=r"same device as the indexed tensor \(cpu\)"):
        x46("cpu")[index.to("npu")]


ERRORS = {
    "broadcast": (RuntimeError, "must match the size", lambda: x46("npu")[0] + x46("npu")[:, 0]),
    "in place, larger": (RuntimeError, "doesn't match the broadcast", lambda: x46("npu")[0].add_(x46("npu"))),
    "in place, type": (RuntimeError, "can't be cast", lambda: indices("npu", 1).add_(0.5)),
    "mm of two types": (RuntimeError, "same dtype", lambda: x46("npu") @ x46("npu").t().double()),
    "mm of wrong sizes": (RuntimeError, "cannot be multiplied", lambda: x46("npu") @ x46("npu")),
    "index too large": (IndexError, "out of bounds", lambda: x46("npu")[indices("npu", 4)]),
    "row too large": (IndexError, "out of range", lambda: F.embedding(indices("npu", 4), x46("npu"))),
    "dimension": (IndexError, "Dimension out of range", lambda: x46("npu").sum(2)),
    "view": (RuntimeError, "view size is not compatible", lambda: x46("npu").t().view(-1)),
    "numpy": (TypeError, "Use Tensor.cpu()", lambda: x46("npu").numpy()),
    "item": (RuntimeError, "cannot be converted to Scalar", lambda: x46("npu").item()),
    "no such device": (RuntimeError, "Invalid device ID", lambda: torch.ones(3, device="npu:99")),
    "sparse": (
        NotImplementedError,
        "sparse_coo are not simulated",
        lambda: torch.eye(3, device="npu").to_sparse(),
    ),
    "floating class": (
        RuntimeError,
        "to be Long",
        lambda: F.cross_entropy(x46("npu"), x46("npu")[:, 0]),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    error, message, function = ERRORS[name]
    with pytest.raises(error, match=message.replace("()", r"\(\)")):
        function()


def test_values_reach_python() -> None:
    x = torch.tensor([1.5, -2.0], device="npu")
    assert (x[0].item(), x.tolist(), float(x[1]), bool(x[0] > 1), len(x)) == (1.5, [1.5, -2.0], -2.0, True, 2)
    assert repr(x) == "tensor([ 1.5000, -2.0000], device='npu:0')"
    assert list(range(10))[torch.tensor(3, device="npu")] == 3


@pytest.mark.parametrize(
    ("map_location", "device"),
    [(None, "npu:0"), ("cpu", "cpu"), ("npu:1", "npu:1"), ({"npu:0": "npu:2"}, "npu:2")],
    ids=str,
)
def test_saved_tensors_are_loaded(tmp_path: Path, map_location: object, device: str) -> None:
    x = numbers(4, 6).to("npu")
    torch.save({"x": x, "row": x[1], "transposed": x.t()}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location=map_location, weights_only=True)
    assert {str(t.device) for t in loaded.values()} == {device}
    assert loaded["x"].cpu().equal(numbers(4, 6))
    # They still share one storage, as when they were saved.
    loaded["x"].zero_()
    assert loaded["row"].abs().sum() == loaded["transposed"].abs().sum() == 0
    assert loaded["transposed"].stride() == (1, 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_saved(dtype: torch.dtype) -> None:
    buffer = io.BytesIO()
    torch.save(torch.tensor([0, 1], dtype=dtype, device="npu"), buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu").equal(torch.tensor([0, 1], dtype=dtype))


def test_a_file_of_the_host_is_loaded_to_the_device(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for mmap in (False, True):
        other = nn.Linear(3, 2).to("npu")
        other.load_state_dict(torch.load(tmp_path / "model.pt", map_location="npu", mmap=mmap))
        assert other.weight.device.type == "npu"
        assert other.weight.cpu().equal(model.weight)


# torch_npu says so for every pickled or deep-copied storage.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_copies_by_python() -> None:
    x = numbers(4, 6).to("npu")
    shared = copy.deepcopy({"x": x, "row": x[1]})
    shared["x"].zero_()
    assert shared["row"].abs().sum() == 0
    assert x.abs().sum() > 0
    for device in ("npu:0", "npu:1"):
        back = pickle.loads(pickle.dumps(x.to(device)))
        assert (str(back.device), back.cpu().equal(x.cpu())) == (device, True)
    parameter = copy.deepcopy(nn.Parameter(x, requires_grad=True))
    assert (parameter.device, parameter.requires_grad, type(parameter)) == (x.device, True, nn.Parameter)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_pins_and_copies(workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0).view(6, 1)), 2, pin_memory=True, num_workers=workers)
    rows = []
    for (batch,) in loader:
        assert batch.is_pinned()
        rows += (batch.to("npu", non_blocking=True) * 10).flatten().tolist()
    assert rows == [0, 10, 20, 30, 40, 50]


def test_pinned_memory() -> None:
    pinned = torch.arange(3.0).pin_memory()
    assert pinned.is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.arange(3.0).is_pinned()
    device = torch.empty(3, device="npu").copy_(pinned, non_blocking=True)
    back = torch.empty(3, pin_memory=True).copy_(device + 1, non_blocking=True)
    torch.npu.synchronize()
    assert back.tolist() == [1, 2, 3]


@pytest.mark.parametrize("source", ["cpu", "npu:0", "npu:1"])
@pytest.mark.parametrize("target", ["cpu", "npu:0", "npu:1"])
def test_copies_between_devices(source: str, target: str) -> None:
    x = numbers(4, 6).to(source).t()[1:]
    moved = x.to(target, torch.float64, copy=True)
    assert str(moved.device) == target
    assert moved.cpu().equal(numbers(4, 6).t()[1:].double())
    into = torch.zeros(5, 8, device=target)[:, ::2]
    into.copy_(x, non_blocking=True)
    assert into.cpu().equal(numbers(4, 6).t()[1:])
    assert (x.to(source) is x, x.data_ptr() != moved.data_ptr()) == (True, True)


def test_an_operator_without_a_kernel_of_torch_npu_falls_back_with_its_warning(capfd: pytest.CaptureFixture) -> None:
    values, positions = torch.mode(indices("npu", 3, 1, 3, 2))
    assert (values.item(), values.device.type) == (3, "npu")
    assert positions.item() in (0, 2)
    # Said once per process: no other test may use this operator.
    assert "'aten::mode' is not currently supported on the NPU backend" in capfd.readouterr().err


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.ones(3, device="npu").mul_(2) + 1
        x[1] = 7
        assert x.tolist() == [3, 7, 3]
        assert x.is_inference()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        x.add_(1)


def test_foreach_over_two_devices_keeps_each_where_it_is() -> None:
    result = torch._foreach_add([torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")], 1)
    assert [str(t.device) for t in result] == ["npu:0", "npu:1"]
    assert [t.tolist() for t in result] == [[2, 2], [2, 2]]
