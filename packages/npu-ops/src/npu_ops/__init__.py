"""Fused operators for Ascend NPUs and their plain-PyTorch references."""

from importlib.metadata import version

from npu_ops.attention import document_causal_mask, document_ids_from_positions, masked_attention

__version__ = version("npu-ops")

__all__ = ["__version__", "document_causal_mask", "document_ids_from_positions", "masked_attention"]
