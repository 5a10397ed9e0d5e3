"""masked_attention and its masks against formulas written out in float64, one query and one key at a time."""

import importlib.metadata
import math
import random

import pytest
import torch

import npu_ops
from npu_ops.attention import document_causal_mask, document_ids_from_positions, masked_attention

INF = float("inf")


def attention_by_loops(q, k, v, mask, scale):
    """Out (B, L, N, V) and LSE (B, N, L) in float64, from the definition; mask is a full (B, N, L, S) tensor."""
    (B, L, N, _), (S, Nkv), V = q.shape, k.shape[1:3], v.shape[-1]
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(B, L, N, V, dtype=torch.float64)
    lse = torch.full((B, N, L), -INF, dtype=torch.float64)
    for b in range(B):
        for n in range(N):
            kv = n * Nkv // N
            for i in range(L):
                keys = [j for j in range(S) if mask[b, n, i, j]]
                if not keys:
                    continue
                scores = [scale * float(q[b, i, n] @ k[b, j, kv]) for j in keys]
                top = max(scores)
                total = math.fsum(math.exp(s - top) for s in scores)
                lse[b, n, i] = top + math.log(total)
                for s, j in zip(scores, keys, strict=True):
                    out[b, i, n] += math.exp(s - top) / total * v[b, j, kv]
    return out, lse


def make_qkv(*, B=2, L=5, S=7, N=4, Nkv=2, H=8, V=8, dtype=torch.float32, requires_grad=False):
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)

    return draw(B, L, N, H), draw(B, S, Nkv, H), draw(B, S, Nkv, V), generator


# bfloat16 has 8 bits of mantissa: inputs are exact in the formula, so only the rounding of the result remains.
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
}
HEADS = {"mha": (4, 4, 8, 8), "gqa": (4, 2, 8, 8), "mqa": (4, 1, 8, 8), "mla": (3, 3, 12, 8), "wide_v": (4, 2, 6, 10)}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("heads", list(HEADS.values()), ids=list(HEADS))
def test_equals_the_float64_formula(heads, dtype):
    N, Nkv, H, V = heads
    q, k, v, generator = make_qkv(N=N, Nkv=Nkv, H=H, V=V, dtype=dtype)
    mask = torch.rand(2, N, 5, 7, generator=generator) < 0.5
    mask[0, 0, 1] = False
    want_out, want_lse = attention_by_loops(q, k, v, mask, H**-0.5)

    out = masked_attention(q, k, v, mask)
    out_with_lse, lse = masked_attention(q, k, v, mask, return_lse=True)

    for got in (out, out_with_lse):
        assert got.shape == (2, 5, N, V)
        assert got.dtype == dtype
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), want_out, **TOLERANCE[dtype])
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The LSE is never rounded to the dtype of the inputs.
    torch.testing.assert_close(
        lse.double(), want_lse, **TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
    )


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (2, 1, 1, 7), (2, 1, 5, 7), (1, 4, 5, 7), (4, 5, 7), (7,), ()], ids=str
)
def test_mask_shapes_broadcast(shape):
    q, k, v, generator = make_qkv()
    mask = torch.rand(shape, generator=generator) < 0.6
    want_out, want_lse = attention_by_loops(q, k, v, mask.expand(2, 4, 5, 7), 8**-0.5)
    torch.testing.assert_close(masked_attention(q, k, v, mask).double(), want_out, rtol=2e-5, atol=2e-6)
    out, lse = masked_attention(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(out.double(), want_out, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("scale", [None, 0.0, 1.7])
def test_scale_and_no_mask(scale):
    q, k, v, _ = make_qkv(H=4)
    everything = torch.ones(2, 4, 5, 7, dtype=torch.bool)
    want_out, want_lse = attention_by_loops(q, k, v, everything, 0.5 if scale is None else scale)
    torch.testing.assert_close(masked_attention(q, k, v, scale=scale).double(), want_out, rtol=2e-5, atol=2e-6)
    out, lse = masked_attention(q, k, v, scale=scale, return_lse=True)
    torch.testing.assert_close(out.double(), want_out, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_dtype(dtype):
    q, k, v, generator = make_qkv(L=9, S=300, H=16, V=16, dtype=dtype)
    mask = torch.rand(2, 4, 9, 300, generator=generator) < 0.5
    want_out, want_lse = attention_by_loops(q, k, v, mask, 0.25)

    def attend(q, k, v):
        return masked_attention(q, k, v, mask), *masked_attention(q, k, v, mask, return_lse=True)

    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            out, out_with_lse, lse = call(q, k, v)
        assert (out.dtype, out_with_lse.dtype, lse.dtype) == (dtype, dtype, torch.float32)
        torch.testing.assert_close(out.double(), want_out, **TOLERANCE[dtype])
        torch.testing.assert_close(out_with_lse.double(), want_out, **TOLERANCE[dtype])
        torch.testing.assert_close(lse.double(), want_lse, **TOLERANCE[torch.float32])


def test_meta_device_gives_shapes():
    q, k, v = (t.to("meta") for t in make_qkv(V=6)[:3])
    assert masked_attention(q, k, v).shape == (2, 5, 4, 6)
    out, lse = masked_attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 5, 4, 6), (2, 4, 5), torch.float32)


@pytest.mark.parametrize("scale", [math.nan, INF, -INF])
@pytest.mark.parametrize("return_lse", [False, True])
def test_scale_that_is_not_finite(scale, return_lse):
    q, k, v, _ = make_qkv()
    with pytest.raises(ValueError, match=f"scale is {scale}; pass a finite number"):
        masked_attention(q, k, v, scale=scale, return_lse=return_lse)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("S", [1, 4, 7, 9, 15, 16, 17, 513])
def test_nan_reaches_every_query_that_attends_to_it(S, masked, dtype):
    for place in "qkv":
        q, k, v, _ = make_qkv(L=4, S=S, dtype=dtype)
        # One query of head 1, or the last key or value of the heads 2 and 3 of the queries.
        bad = {"q": q[0, 2, 1], "k": k[0, -1, 1], "v": v[0, -1, 1]}[place]
        bad[3 if place != "v" else slice(None)] = math.nan
        want = torch.zeros(2, 4, 4, dtype=torch.bool)
        if place == "q":
            want[0, 2, 1] = True
        else:
            want[0, :, 2:] = True
        mask = torch.ones(4, S, dtype=torch.bool) if masked else None
        for out in (masked_attention(q, k, v, mask), masked_attention(q, k, v, mask, return_lse=True)[0]):
            assert torch.equal(out.isnan().all(-1), want), place
            assert torch.equal(out.isnan().any(-1), want), place


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_key_that_is_not_finite_stays_with_its_queries_when_lse_is_returned(bad):
    q, k, v, _ = make_qkv(L=4)
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[:3, -1] = False
    want_out, want_lse = attention_by_loops(q, k, v, mask.expand(2, 4, -1, -1), 8**-0.5)
    k[:, -1] = bad
    out, lse = masked_attention(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(out[:, :3].double(), want_out[:, :3], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse[..., :3].double(), want_lse[..., :3], rtol=2e-5, atol=2e-6)


def test_packed_documents_equal_each_document_alone():
    q, k, v, _ = make_qkv(L=9, S=9)
    lengths = [4, 2, 3]
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2]]).expand(2, -1)
    packed = masked_attention(q, k, v, document_causal_mask(ids)).double()
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        causal = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 4, -1, -1)
        want, _ = attention_by_loops(q[:, part], k[:, part], v[:, part], causal, 8**-0.5)
        torch.testing.assert_close(packed[:, part], want, rtol=2e-5, atol=2e-6)
        start += length


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("H", "V"), [(4, 4), (4, 2), (2, 3)])
def test_gradients(return_lse, H, V):
    q, k, v, generator = make_qkv(B=1, L=4, S=5, N=4, Nkv=2, H=H, V=V, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(1, 4, 4, 5, generator=generator) < 0.6
    mask[..., 0] = True

    def attend(q, k, v):
        return masked_attention(q, k, v, mask, return_lse=return_lse)

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("return_lse", [False, True])
def test_rows_that_attend_to_nothing(return_lse, dtype):
    q, k, v, _ = make_qkv(dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    mask[0, :, 2] = False
    result = masked_attention(q, k, v, mask, return_lse=return_lse)
    out = result[0] if return_lse else result
    assert (out[0, 2] == 0).all()
    assert (out[1, 2] != 0).all()
    loss = out.float().square().sum()
    if return_lse:
        lse = result[1]
        assert (lse[0, :, 2] == -INF).all()
        assert lse[1].isfinite().all()
        loss = loss + lse[lse.isfinite()].sum()
    loss.backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[0, 2] == 0).all()
    assert (q.grad[1, 2] != 0).any()


@pytest.mark.parametrize(("L", "S"), [(0, 3), (3, 0)])
def test_no_queries_and_no_keys(L, S):
    q, k, v, _ = make_qkv(L=L, S=S)
    mask = torch.ones(L, S, dtype=torch.bool)
    assert torch.equal(masked_attention(q, k, v, mask), torch.zeros(2, L, 4, 8))
    out, lse = masked_attention(q, k, v, mask, return_lse=True)
    assert torch.equal(out, torch.zeros(2, L, 4, 8))
    assert torch.equal(lse, torch.full((2, 4, L), -INF))


@pytest.mark.parametrize("return_lse", [False, True])
def test_traces_whole(return_lse):
    q, k, v, _ = make_qkv(L=6, S=6, V=4, requires_grad=True)
    ids = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 2, 2]])

    def attend(q, k, v, ids):
        result = masked_attention(q, k, v, document_causal_mask(ids, window=2), return_lse=return_lse)
        return result if return_lse else (result,)

    eager = attend(q, k, v, ids)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v, ids)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want)
    want_grads = torch.autograd.grad(eager[0].sum(), (q, k, v))
    got_grads = torch.autograd.grad(compiled[0].sum(), (q, k, v))
    for got, want in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got, want)


def test_document_causal_mask():
    got = document_causal_mask(torch.tensor([[7, 7, 7, 3, 3, -1]]))
    want = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert got.dtype == torch.bool
    assert got.shape == (1, 1, 6, 6)
    assert got[0, 0].int().tolist() == want


def test_document_causal_mask_window():
    got = document_causal_mask(torch.tensor([[0, 0, 0, 0, 1]], dtype=torch.int32), window=2)
    want = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert got[0, 0].int().tolist() == want


def test_document_ids_from_positions():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 0, 0, 1, 2]])
    assert document_ids_from_positions(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1]]


def tensors(**changes):
    made = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8)} | changes
    return tuple(torch.zeros(made[name]) for name in "qkv")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (tensors(q=(5, 4, 8)), "q_BLNH has shape (5, 4, 8)"),
        (tensors(k=(3, 7, 2, 8)), "batch (first) and head size"),
        (tensors(k=(2, 7, 2, 9)), "batch (first) and head size"),
        (tensors(v=(2, 6, 2, 8)), "(B, S, Nkv), must be equal"),
        (tensors(k=(2, 7, 3, 8), v=(2, 7, 3, 8)), "4 heads and k_BSNH 3"),
        (tensors(k=(2, 7, 0, 8), v=(2, 7, 0, 8)), "4 heads and k_BSNH 0"),
        ((*tensors()[:2], tensors()[2].double()), "share one floating dtype"),
        (tuple(t.int() for t in tensors()), "share one floating dtype"),
        (tuple(t.to(torch.float8_e4m3fn) for t in tensors()), "share one floating dtype"),
        (tensors(q=(2, 5, 4, 0), k=(2, 7, 2, 0)), "the head size (last) must be at least 1"),
        (([[1.0]], *tensors()[1:]), "q_BLNH is of type list"),
        ((*tensors(), torch.zeros(5, 7)), "boolean mask"),
        ((*tensors(), [[True]]), "mask is of type list; pass a boolean mask"),
        ((*tensors(), torch.ones(5, 6, dtype=torch.bool)), "does not broadcast"),
        ((*tensors(), torch.ones(1, 2, 4, 5, 7, dtype=torch.bool)), "does not broadcast"),
    ],
)
def test_attention_errors(arguments, words):
    with pytest.raises(ValueError, match=r"\bq_BLNH\b|\bk_BSNH\b|\bmask\b") as raised:
        masked_attention(*arguments)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: document_causal_mask(torch.zeros(1, 4)), "pass integers"),
        (lambda: document_causal_mask(torch.zeros(4, dtype=torch.int64)), "pass integers"),
        (lambda: document_causal_mask(torch.zeros(1, 4, dtype=torch.int64), window=0), "window is 0"),
        (lambda: document_ids_from_positions(torch.zeros(1, 4, dtype=torch.bool)), "pass integers"),
        (lambda: document_ids_from_positions([[0, 1]]), "is of type list; pass a tensor of integers"),
    ],
)
def test_mask_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_package_exports():
    assert npu_ops.__version__ == importlib.metadata.version("npu-ops")
    assert npu_ops.masked_attention is masked_attention
    assert all(hasattr(npu_ops, name) for name in npu_ops.__all__)
