"""What our own recipes train, as torchtitan's configuration functions (``--module npu_train.recipe_configs``)."""

import dataclasses
from functools import partial
from importlib.resources import files

import torch.nn as nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    decoder_vocab_size,
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.common.param_init import depth_scaled_std
from torchtitan.models.llama3 import model_registry as llama3_registry
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from .data import TextDataLoader
from .trainer import LastStepValidator

QUICKSTART_DATA = files("npu_train") / "assets" / "quickstart"
QUICKSTART_VOCAB_SIZE = 2048


def _quickstart_llama() -> Llama3Model.Config:
    dim, n_heads, n_kv_heads, n_layers, hidden_dim = 192, 6, 2, 4, 512
    linear_init = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
    norm = partial(RMSNorm.Config, normalized_shape=dim, param_init={"weight": nn.init.ones_})
    rope = ComplexRoPE.Config(dim=dim // n_heads, max_seq_len=4096, theta=10000)

    def block(layer_id: int) -> Llama3TransformerBlock.Config:
        std = depth_scaled_std(0.02, layer_id)
        depth_init = {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}
        return Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                wqkv_param_init=linear_init,
                wo_param_init=depth_init,
                inner_attention=get_attention_config("flex"),
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hidden_dim, w1_param_init=linear_init, w2w3_param_init=depth_init
            ),
        )

    return Llama3Model.Config(
        dim=dim,
        vocab_size=QUICKSTART_VOCAB_SIZE,
        tok_embeddings=Embedding.Config(
            num_embeddings=QUICKSTART_VOCAB_SIZE,
            embedding_dim=dim,
            param_init={"weight": partial(nn.init.normal_, std=1.0)},
        ),
        norm=norm(),
        lm_head=Linear.Config(
            in_features=dim,
            out_features=QUICKSTART_VOCAB_SIZE,
            # Small logits at first, so that training starts from the loss of a uniform guess, ln(vocabulary).
            param_init=linear_init,
        ),
        layers=[block(layer_id) for layer_id in range(n_layers)],
    )


def _on_quickstart_data(model_spec: ModelSpec, *, steps: int, lr: float) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path=str(QUICKSTART_DATA / "tokenizer"),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        ),
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=20, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            local_batch_size=8,
            global_batch_size=8,
            seq_len=256,
            steps=steps,
            # bfloat16 attention backward is slower than float32 on CPUs (docs: npu-train).
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=TextDataLoader.Config(dataset_path=str(QUICKSTART_DATA / "corpus.jsonl")),
        validator=LastStepValidator.Config(
            enable=True,
            freq=steps,
            steps=4,
            dataloader=TextDataLoader.Config(
                dataset_path=str(QUICKSTART_DATA / "validation.jsonl"), infinite=False, shuffle=False
            ),
        ),
        metrics=MetricsProcessor.Config(log_freq=20),
        checkpoint=CheckpointManager.Config(enable=True, interval=100, keep_latest_k=3, last_save_model_only=False),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
    )


def quickstart() -> Trainer.Config:
    """A small Llama on the shipped corpus."""
    spec = dataclasses.replace(llama3_registry("debugmodel"), flavor="quickstart", model=_quickstart_llama())
    return _on_quickstart_data(spec, steps=200, lr=3e-3)
