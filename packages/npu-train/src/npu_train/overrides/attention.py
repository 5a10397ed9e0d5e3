"""Document-masked attention where torchtitan's own backends have no kernel.

FlexAttention has no backward on the CPU and refuses NPU devices; VarlenAttention needs a CUDA flash kernel. Both
contracts are met here by ``npu_ops.masked_attention`` on the very masks that torchtitan builds, so that packed
documents, sliding windows, grouped heads, attention sinks and context parallelism keep their meaning.

Shape suffixes: B batch, L query length, S key length, N heads, H head size, T = B*L packed tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.config import derive, override
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

from npu_ops import masked_attention

OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _dense_mask_BNLS(block_mask: BlockMask, device: torch.device) -> torch.Tensor:
    """The boolean mask (True = attend) of a block mask, computed once a block mask, that is once a step."""
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    length_q, length_kv = block_mask.seq_lengths
    if torch.compiler.is_compiling():
        # Inside a graph the mask fuses into its consumer; an attribute set there would be a side effect of the graph.
        return create_mask(block_mask.mask_mod, batch, heads, length_q, length_kv, device)
    dense = getattr(block_mask, "_npu_train_dense", None)
    if dense is None:
        dense = create_mask(block_mask.mask_mod, batch, heads, length_q, length_kv, device)
        block_mask._npu_train_dense = dense
    return dense


def _finish(
    out_BLNH: torch.Tensor, lse_BLN: torch.Tensor | None, q_BLNH: torch.Tensor, out_transform: OutTransform | None
) -> torch.Tensor:
    """Give the results the SPMD types of the query while torchtitan's type checker runs, and apply the epilogue."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        local_type, spec = spmd.get_local_type(q_BLNH), get_partition_spec(q_BLNH)
        spmd.assert_type(out_BLNH, local_type, spec)
        if lse_BLN is not None:
            spmd.assert_type(lse_BLN, local_type, None if spec is None else spmd.PartitionSpec(*spec[:-1]))
    return out_BLNH if out_transform is None else out_transform(out_BLNH, lse_BLN)


class MaskedFlexAttention(FlexAttention):
    """``FlexAttention`` over a dense boolean mask: O(L*S) mask memory, any device, forward and backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; shapes and meaning are those of torchtitan's ``FlexAttention.forward``.

        Raises:
            TypeError: ``attention_masks`` is not a ``BlockMask``.
            NotImplementedError: a ``score_mod`` is given.
        """
        if not isinstance(attention_masks, BlockMask):
            raise TypeError(f"attention_masks must be a BlockMask, got {type(attention_masks).__name__}")
        if score_mod is not None:
            raise NotImplementedError("score_mod has no dense counterpart; use FlexAttention on a device that has it")
        with spmd.no_typecheck():
            mask = _dense_mask_BNLS(attention_masks, q_BLNH.device)
            result = masked_attention(q_BLNH, k_BLNH, v_BLNH, mask, scale=scale, return_lse=out_transform is not None)
            out_BLNH, lse_BLN = (result, None) if out_transform is None else (result[0], result[1].transpose(1, 2))
        return _finish(out_BLNH, lse_BLN, q_BLNH, out_transform)


class DocumentVarlenAttention(VarlenAttention):
    """``VarlenAttention`` as one masked attention a document: O(longest document squared) memory, any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def _window_mask_LS(self, length: int, device: torch.device) -> torch.Tensor:
        left, right = self.window_size
        offset = torch.arange(length, device=device)[None, :] - torch.arange(length, device=device)[:, None]
        mask = torch.ones(length, length, dtype=torch.bool, device=device)
        if left >= 0:
            mask &= offset >= -left
        if right >= 0:
            mask &= offset <= right
        return mask

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: OutTransform | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; shapes and meaning are those of torchtitan's ``VarlenAttention.forward``.

        Raises:
            TypeError: ``attention_masks`` is not a ``VarlenMetadata``.
        """
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(f"attention_masks must be a VarlenMetadata, got {type(attention_masks).__name__}")
        batch, length = q_BLNH.shape[:2]
        offsets = attention_masks.cu_seq_q_host
        if offsets is None:
            offsets = attention_masks.cu_seq_q.tolist()
        lengths = [end - start for start, end in pairwise(offsets)]
        with spmd.no_typecheck():
            outs, lses = [], []
            for q_LNH, k_LNH, v_LNH in zip(
                *(t.flatten(0, 1).split(lengths) for t in (q_BLNH, k_BLNH, v_BLNH)), strict=True
            ):
                mask_LS = self._window_mask_LS(q_LNH.shape[0], q_LNH.device)
                result = masked_attention(
                    q_LNH[None],
                    k_LNH[None],
                    v_LNH[None],
                    mask_LS[None, None],
                    scale=scale,
                    return_lse=out_transform is not None,
                )
                if out_transform is not None:
                    result, lse_BNL = result
                    lses.append(lse_BNL[0].T)
                outs.append(result[0])
            out_BLNH = torch.cat(outs).unflatten(0, (batch, length))
            lse_BLN = torch.cat(lses).unflatten(0, (batch, length)) if lses else None
        return _finish(out_BLNH, lse_BLN, q_BLNH, out_transform)


@override(target=FlexAttention.Config, exact=True, description="document-masked attention on any device")
def masked_flex_attention(config: FlexAttention.Config) -> MaskedFlexAttention.Config:
    return derive(config, MaskedFlexAttention.Config)


@override(target=VarlenAttention.Config, exact=True, description="one masked attention a document, on any device")
def document_varlen_attention(config: VarlenAttention.Config) -> DocumentVarlenAttention.Config:
    return derive(config, DocumentVarlenAttention.Config)
