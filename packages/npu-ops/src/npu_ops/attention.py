"""Masked attention in plain PyTorch, for any device: the reference of the fused attention operators.

Shape suffixes: B batch, L queries, S keys, N heads, H head size of queries and keys, V head size of values.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, overload

import torch
import torch.nn.functional as F

_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF, torch.float32, torch.float64)
# The widest vector of a CPU kernel, in float32 numbers (AVX-512).
_VECTOR = 16


@overload
def masked_attention(
    q_BLNH: torch.Tensor,
    k_BSNH: torch.Tensor,
    v_BSNV: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def masked_attention(
    q_BLNH: torch.Tensor,
    k_BSNH: torch.Tensor,
    v_BSNV: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def masked_attention(
    q_BLNH: torch.Tensor,
    k_BSNH: torch.Tensor,
    v_BSNV: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention under a boolean mask: ``softmax(scale * q @ k.T, over the keys the mask allows) @ v``.

    Without ``return_lse`` this is ``F.scaled_dot_product_attention`` with ``enable_gqa``. On a CPU two things are done
    first, because of what was measured there (x86-64, torch 2.14.0, forward + backward, one thread, B=2, L=S=256, 16
    query and 4 key/value heads, boolean mask; best of 8):

    * float32: ``enable_gqa`` 13 ms, repeated heads 14 ms, unfused 35 ms (H=16); 32, 35 and 54 ms (H=64).
    * bfloat16: 71 ms as it is, 15 ms computed in float32 (H=16); 270 and 37 ms (H=64). So bfloat16 and float16 are
      computed in float32, which is also more accurate.
    * V != H: the fused CPU kernel wants equal head sizes. Zero padding to the larger one gives 35 ms instead of 46 ms
      (float32, H=48, V=32), and no (L, S) matrix in memory.

    ``torch.autocast`` changes none of these dtypes: it is off inside on a CPU, and with ``return_lse`` on any device.

    Inputs are expected to be finite. Where they are not, the following holds on a CPU, and with ``return_lse`` on any
    device. A query that is NaN, or attends to a key or value that is, has a NaN in its output. One that does not attend
    to it may have a NaN as well, because a masked key still takes part, with weight 0; only with ``return_lse`` does a
    key that is not finite stay with the queries that attend to it. Where every score of a query is -inf, from an
    infinity or an overflow, its output is NaN with ``return_lse`` and may be 0 without.

    Args:
        q_BLNH: Queries (B, L, N, H) in bfloat16, float16, float32 or float64; H is at least 1.
        k_BSNH: Keys (B, S, Nkv, H), dtype of the queries. N must be a multiple of Nkv; query head n uses key/value head
            ``n // (N // Nkv)``.
        v_BSNV: Values (B, S, Nkv, V), dtype of the queries. V may differ from H (multi-head latent attention).
        mask: Boolean, True where a query attends to a key; broadcastable to (B, N, L, S). None: every key.
        scale: Factor of the scores, finite; None is ``H ** -0.5``.
        return_lse: Also return the logarithm of the softmax denominators. The scores are then computed unfused, in
            float32 (float64 for float64 inputs), and take O(B N L S) memory.

    Returns:
        The output (B, L, N, V), contiguous, in the dtype of the queries. With ``return_lse``, the pair of it and the
        natural-log LSE (B, N, L) in float32 (float64 for float64 inputs). A query that attends to nothing has output 0,
        LSE -inf, and contributes no gradient.

    Raises:
        ValueError: Inputs that are not tensors, shapes, dtypes or head counts that do not fit together, a mask that is
            not boolean, or a scale that is not finite.
    """
    _check_qkv(q_BLNH, k_BSNH, v_BSNV)
    B, L, N, H = q_BLNH.shape
    S = k_BSNH.shape[1]
    if scale is None:
        scale = H**-0.5
    elif not -math.inf < scale < math.inf:
        raise ValueError(f"scale is {scale}; pass a finite number, or None for H ** -0.5.")

    attends = None
    if mask is not None:
        mask = _mask_4d(mask, (B, N, L, S))
        # Softmax over nothing is 0/0, and kernels differ in what they make of it. Rows without a key attend to all keys
        # and are zeroed afterwards: that is finite on every device, forward and backward.
        attends = mask.any(dim=-1, keepdim=True)
        mask = mask | ~attends

    if not return_lse:
        out_BLNV = _fused(q_BLNH, k_BSNH, v_BSNV, mask, scale)
        if attends is not None:
            out_BLNV = torch.where(attends.transpose(1, 2), out_BLNV, 0.0)
        return out_BLNV.contiguous()

    out_BLNV, lse_BNL = _unfused(q_BLNH, k_BSNH, v_BSNV, mask, scale)
    if attends is not None:
        out_BLNV = torch.where(attends.transpose(1, 2), out_BLNV, 0.0)
        lse_BNL = torch.where(attends.squeeze(-1), lse_BNL, float("-inf"))
    return out_BLNV.contiguous(), lse_BNL


def document_ids_from_positions(positions_BL: torch.Tensor) -> torch.Tensor:
    """Number the documents of packed sequences from positions that restart at 0 with each document.

    Args:
        positions_BL: Integer positions (B, L).

    Returns:
        int64 document numbers (B, L), counted from 0 in each row; tokens before the first position 0 also get 0.

    Raises:
        ValueError: ``positions_BL`` is not a two-dimensional integer tensor.
    """
    _check_integer_BL("positions_BL", positions_BL)
    return ((positions_BL == 0).cumsum(dim=1) - 1).clamp(min=0)


def document_causal_mask(document_ids_BL: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
    """Causal mask that keeps the documents of a packed sequence apart.

    Query i attends to key j when both have the same document id, ``j <= i`` and, with a window, ``i - j < window``.
    Under context parallelism take the rows of the local queries: ``mask[:, :, query_index]``.

    Args:
        document_ids_BL: Integer document id of each token (B, L); a negative id is padding, which attends to nothing
            and is attended by nothing.
        window: Largest number of keys a query sees, itself included; None is no limit.

    Returns:
        Boolean mask (B, 1, L, L), True = attend, on the device of the ids.

    Raises:
        ValueError: The ids are not a two-dimensional integer tensor, or the window is below 1.
    """
    _check_integer_BL("document_ids_BL", document_ids_BL)
    if window is not None and window < 1:
        raise ValueError(
            f"window is {window}; it counts the keys a query sees, itself included: pass 1 or more, or None."
        )
    index_L = torch.arange(document_ids_BL.shape[1], device=document_ids_BL.device)
    distance_LS = index_L[:, None] - index_L[None, :]
    allowed_LS = distance_LS >= 0
    if window is not None:
        allowed_LS = allowed_LS & (distance_LS < window)
    same_BLS = document_ids_BL[:, :, None] == document_ids_BL[:, None, :]
    token_BL1 = (document_ids_BL >= 0)[:, :, None]
    return (same_BLS & token_BL1 & allowed_LS)[:, None]


def _fused(
    q_BLNH: torch.Tensor, k_BSNH: torch.Tensor, v_BSNV: torch.Tensor, mask_BNLS: torch.Tensor | None, scale: float
) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BSNH, v_BSNV))
    if q.device.type == "cpu":
        if q.dtype in _HALF:
            q, k, v = q.float(), k.float(), v.float()
        width = max(q.shape[-1], v.shape[-1])
        q, k, v = (t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
        if mask_BNLS is None and k.shape[2] < _VECTOR:
            # Without a mask the kernel loses a NaN in rows shorter than a vector: it returns 0 for them.
            mask_BNLS = q.new_ones((1, 1, 1, 1), dtype=torch.bool)
    with _no_autocast(q) if q.device.type == "cpu" else nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_BNLS, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out[..., : v_BSNV.shape[-1]].transpose(1, 2).to(q_BLNH.dtype)


def _unfused(
    q_BLNH: torch.Tensor, k_BSNH: torch.Tensor, v_BSNV: torch.Tensor, mask_BNLS: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q_BLNH.dtype == torch.float64 else torch.float32
    repeats = q_BLNH.shape[2] // k_BSNH.shape[2]
    q = q_BLNH.transpose(1, 2).to(dtype)
    k, v = (t.transpose(1, 2).to(dtype).repeat_interleave(repeats, dim=1) for t in (k_BSNH, v_BSNV))
    with _no_autocast(q):
        scores_BNLS = (q * scale) @ k.transpose(-1, -2)
        if mask_BNLS is not None:
            scores_BNLS = scores_BNLS.masked_fill(~mask_BNLS, float("-inf"))
        lse_BNL = scores_BNLS.logsumexp(dim=-1)
        out = (scores_BNLS - lse_BNL[..., None]).exp() @ v
    return out.transpose(1, 2).to(q_BLNH.dtype), lse_BNL


def _no_autocast(tensor: torch.Tensor) -> AbstractContextManager:
    device = tensor.device.type
    # A meta tensor has no autocast to ask about.
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _mask_4d(mask: torch.Tensor, shape_BNLS: tuple[int, int, int, int]) -> torch.Tensor:
    """The mask with leading dimensions of size 1 added, so that it has four."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise ValueError(f"mask {_kind(mask)}; pass a boolean mask, True where a query attends to a key.")
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(padded) > 4 or any(m not in (1, n) for m, n in zip(padded, shape_BNLS, strict=False)):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, which does not broadcast to (B, N, L, S) = {tuple(shape_BNLS)}; "
            "each of its dimensions, counted from the last, must be 1 or equal to that one."
        )
    return mask.view(padded)


def _check_qkv(q_BLNH: torch.Tensor, k_BSNH: torch.Tensor, v_BSNV: torch.Tensor) -> None:
    for name, tensor, dims in (
        ("q_BLNH", q_BLNH, "(B, L, N, H)"),
        ("k_BSNH", k_BSNH, "(B, S, Nkv, H)"),
        ("v_BSNV", v_BSNV, "(B, S, Nkv, V)"),
    ):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} {_kind(tensor)}; pass a tensor {dims}.")
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have four dimensions {dims}.")
        if tensor.dtype not in _DTYPES or tensor.dtype != q_BLNH.dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} and q_BLNH {q_BLNH.dtype}; "
                "queries, keys and values must share one floating dtype: bfloat16, float16, float32 or float64."
            )
    q_shape, k_shape, v_shape = tuple(q_BLNH.shape), tuple(k_BSNH.shape), tuple(v_BSNV.shape)
    if q_shape[0] != k_shape[0] or q_shape[3] != k_shape[3]:
        raise ValueError(
            f"q_BLNH has shape {q_shape} and k_BSNH {k_shape}; batch (first) and head size (last) must be equal."
        )
    if q_shape[3] == 0:
        raise ValueError(f"q_BLNH has shape {q_shape} and k_BSNH {k_shape}; the head size (last) must be at least 1.")
    if k_shape[:3] != v_shape[:3]:
        raise ValueError(
            f"k_BSNH has shape {k_shape} and v_BSNV {v_shape}; all but the last dimension, (B, S, Nkv), must be equal."
        )
    if k_shape[2] == 0 or q_shape[2] % k_shape[2] != 0:
        raise ValueError(
            f"q_BLNH has {q_shape[2]} heads and k_BSNH {k_shape[2]}; "
            "the query heads must be a multiple of the key/value heads."
        )


def _kind(value: object) -> str:
    return f"has dtype {value.dtype}" if isinstance(value, torch.Tensor) else f"is of type {type(value).__name__}"


def _check_integer_BL(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} {_kind(tensor)}; pass a tensor of integers (B, L).")
    if tensor.dim() != 2 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; pass integers (B, L).")
