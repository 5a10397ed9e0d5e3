"""The attention overrides against torch's own flex_attention, and against loops in float64."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention
from torchtitan.models.common.attention import (
    FlexAttention,
    VarlenAttention,
    create_varlen_metadata_for_document,
    get_causal_mask_mod,
    get_document_mask_mod,
    get_sliding_window_mask_mod,
)

from npu_train.overrides.attention import (
    DocumentVarlenAttention,
    MaskedFlexAttention,
    document_varlen_attention,
    masked_flex_attention,
)

B, L, N, N_KV, H = 2, 48, 4, 2, 8


@pytest.fixture(autouse=True)
def eager() -> None:
    torch.compiler.set_stance("force_eager")


def positions_of_packed_documents() -> torch.Tensor:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    rows = []
    for _ in range(B):
        cuts = sorted(rng.sample(range(1, L), 4))
        rows.append([i - start for start, end in zip([0, *cuts], [*cuts, L], strict=True) for i in range(start, end)])
    return torch.tensor(rows)


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, L, N, H), (B, L, N_KV, H), (B, L, N_KV, H)]
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def loops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over its own document, one query at a time."""
    out, lse = [], []
    for b in range(B):
        for i in range(L):
            first = i - int(positions[b, i])
            if window is not None:
                first = max(first, i - window + 1)
            for n in range(N):
                kv = n // (N // N_KV)
                scores = k[b, first : i + 1, kv] @ q[b, i, n] * H**-0.5
                lse.append(scores.logsumexp(0))
                out.append((scores - lse[-1]).exp() @ v[b, first : i + 1, kv])
    return torch.stack(out).view(B, L, N, H), torch.stack(lse).view(B, L, N)


def block_mask(positions: torch.Tensor, window: int | None) -> BlockMask:
    mods = [get_causal_mask_mod(), get_document_mask_mod(positions)]
    if window is not None:
        mods.append(get_sliding_window_mask_mod(window))
    return create_block_mask(and_masks(*mods), B, None, L, L, device="cpu")


def flex() -> MaskedFlexAttention:
    return masked_flex_attention(FlexAttention.Config()).build()


def varlen(window: int | None) -> DocumentVarlenAttention:
    size = (-1, 0) if window is None else (window - 1, 0)
    return document_varlen_attention(VarlenAttention.Config(window_size=size)).build()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_outputs_and_gradients_are_those_of_loops(kind: str, window: int | None) -> None:
    positions = positions_of_packed_documents()
    q, k, v = tensors()
    expected, expected_lse = loops(q, k, v, positions, window)
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    expected_grads = torch.autograd.grad((expected * weight).sum() + expected_lse.sum(), (q, k, v))

    seen = {}

    def epilogue(out_BLNH: torch.Tensor, lse_BLN: torch.Tensor) -> torch.Tensor:
        seen["lse"] = lse_BLN
        return out_BLNH

    attention = flex() if kind == "flex" else varlen(window)
    masks = block_mask(positions, window) if kind == "flex" else create_varlen_metadata_for_document(positions)
    plain = attention(q, k, v, attention_masks=masks, enable_gqa=True)
    out = attention(q, k, v, attention_masks=masks, enable_gqa=True, out_transform=epilogue)
    torch.testing.assert_close(plain, expected)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(seen["lse"], expected_lse)
    grads = torch.autograd.grad((out * weight).sum() + seen["lse"].sum(), (q, k, v))
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_forward_agrees_with_flex_attention() -> None:
    masks = block_mask(positions_of_packed_documents(), 7)
    q, k, v = (t.detach() for t in tensors(torch.float32))
    expected, aux = flex_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), block_mask=masks, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    lses = []
    out = flex()(q, k, v, attention_masks=masks, out_transform=lambda o, lse: lses.append(lse) or o)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lses[0], aux.lse.transpose(1, 2))


def test_wrong_masks_are_refused() -> None:
    q, k, v = tensors()
    positions = positions_of_packed_documents()
    with pytest.raises(TypeError, match="must be a BlockMask, got VarlenMetadata"):
        flex()(q, k, v, attention_masks=create_varlen_metadata_for_document(positions))
    with pytest.raises(TypeError, match="must be a VarlenMetadata, got BlockMask"):
        varlen(None)(q, k, v, attention_masks=block_mask(positions, None))
    with pytest.raises(NotImplementedError, match="score_mod"):
        flex()(q, k, v, attention_masks=block_mask(positions, None), score_mod=lambda s, *_: s)
