"""Continue a text with the weights of a checkpoint.

Import only after ``device.select_device``: this module imports torchtitan.
"""

import contextlib
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from . import checkpoints
from .errors import InputError, reason
from .trainer import first_nonfinite


def resolve_checkpoint(path: str | Path) -> checkpoints.Checkpoint:
    """The checkpoint that ``path`` means: a ``step-N`` folder, or the newest in a checkpoint or run folder.

    Raises:
        InputError: there is none, or it is not whole.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise InputError(f"there is no checkpoint {path}. Give --checkpoint a run's folder or a step-N folder in it.")
    if path.name.startswith("step-") and path.name[5:].isdigit():
        problem = checkpoints.inspect(path)
        if problem:
            others = ", ".join(str(c.step) for c in checkpoints.find_checkpoints(path.parent) if c.complete) or "none"
            raise InputError(f"the checkpoint {path} cannot be loaded: {problem}. Whole steps beside it: {others}.")
        return checkpoints.Checkpoint(int(path.name[5:]), path.resolve(), None)
    for folder in (path, path / "checkpoint"):
        newest = checkpoints.latest(folder)
        if newest is not None:
            return newest
        broken = checkpoints.find_checkpoints(folder)
        if broken:
            raise InputError(f"no whole checkpoint in {folder}: {broken[-1].path.name}: {broken[-1].problem}.")
    raise InputError(f"no checkpoint in {path}. Give --checkpoint a run's folder or a step-N folder in it.")


def load_model(config: Trainer.Config, checkpoint: Path) -> Decoder:
    """Build the whole model in this process and load the weights of a distributed checkpoint into it.

    Raises:
        InputError: the model is not a decoder, or the checkpoint is of another model, damaged or not finite.
    """
    spec = config.model_spec.model
    if not (checkpoint / ".metadata").is_file():
        raise InputError(
            f"{checkpoint} holds safetensors, which sample does not read. Load them into a run with "
            "--checkpoint.initial-load-path and --checkpoint.initial-load-in-hf, and sample from its checkpoint."
        )
    if not isinstance(spec, Decoder.Config):
        raise InputError(f"{config.model_spec.name} is not a decoder of tokens, so it cannot continue a text.")
    for field in ("data_parallel_replicate_degree", "tensor_parallel_degree", "context_parallel_degree"):
        setattr(config.parallelism, field, 1)
    config.parallelism.pipeline_parallel_degree = config.parallelism.expert_parallel_degree = 1
    config.parallelism.data_parallel_shard_degree = 1
    spec.update_from_config(config=config)
    if config.override.imports:
        apply_overrides(config.override, config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.to_empty(device=utils.device_type)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    state = model.state_dict()
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    wrong = [
        name for name, tensor in state.items() if name not in stored or tuple(stored[name].size) != tuple(tensor.shape)
    ]
    if wrong:
        raise InputError(
            f"the checkpoint {checkpoint} is of another model: {wrong[0]} "
            f"{'is not in it' if wrong[0] not in stored else 'has another shape'} "
            f"({len(wrong)} of {len(state)} tensors do not fit {config.model_spec.name} {config.model_spec.flavor})."
        )
    with warnings.catch_warnings():
        # Loading in one process is what is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
        # Is no Exception, and prints as tracebacks.
        except dcp.CheckpointException as error:
            why = reason(next(iter(error.failures.values()))[0])
            raise InputError(f"the checkpoint {checkpoint} is damaged: it does not load ({why}).") from error
    model.load_state_dict(state)
    broken = first_nonfinite(model.named_parameters())
    if broken is not None:
        raise InputError(
            f"the weights in {checkpoint} are not finite ({broken} is the first): the run had diverged. Sample from an "
            "earlier checkpoint."
        )
    return model.eval()


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: list[int],
    *,
    max_new_tokens: int,
    context: int,
    temperature: float = 0.8,
    top_k: int = 50,
    stop: int | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
) -> list[int]:
    """Sample up to ``max_new_tokens`` token ids after ``tokens``.

    Args:
        model: A decoder with its output layer.
        tokens: The prompt; at least one id.
        max_new_tokens: Upper bound of the continuation.
        context: Longest sequence the model was trained on; older tokens are dropped.
        temperature: 0 takes the likeliest token each time.
        top_k: Sample among this many likeliest tokens; 0 among all.
        stop: Id that ends the text.
        seed: Seed of the sampling.
        vocab_size: Ids at or beyond it are padding of the vocabulary and are never drawn.

    Returns:
        The new ids, without the prompt and without ``stop``.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    attention = getattr(model.config.first_attention, "inner_attention", None)
    masked = isinstance(attention, (FlexAttention.Config, VarlenAttention.Config))
    tokens, new = list(tokens), []
    for _ in range(max_new_tokens):
        input_BL = torch.tensor([tokens[-context:]], device=device)
        positions_BL = torch.arange(input_BL.shape[1], device=device)[None]
        masks = {"attention_masks": model.get_attention_masks(positions=positions_BL)} if masked else {}
        logits_V = model(input_BL, positions=positions_BL, **masks)[0, -1].float()[:vocab_size]
        if temperature == 0:
            choice = int(logits_V.argmax())
        else:
            if top_k:
                kept = logits_V.topk(min(top_k, logits_V.numel())).values[-1]
                logits_V = logits_V.masked_fill(logits_V < kept, float("-inf"))
            choice = int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
        if choice == stop:
            break
        tokens.append(choice)
        new.append(choice)
    return new


def sample(
    config: Trainer.Config,
    checkpoint: Path,
    prompts: list[str],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> list[str]:
    """Continue each prompt with the weights in ``checkpoint``; returns prompt and continuation together.

    Raises:
        InputError: the checkpoint is of another model, or a prompt is empty.
    """
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    with contextlib.ExitStack() as stack:
        if not config.compile.enable:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model = load_model(config, checkpoint)
        texts = []
        for prompt in prompts:
            ids = tokenizer.encode(prompt, add_bos=True, add_eos=False)
            if not ids:
                raise InputError("the prompt is empty and the tokenizer has no begin mark. Give --prompt some text.")
            new = generate(
                model,
                ids,
                max_new_tokens=max_new_tokens,
                context=config.training.seq_len,
                temperature=temperature,
                top_k=top_k,
                stop=tokenizer.eos_id,
                seed=seed,
                vocab_size=tokenizer.get_vocab_size(),
            )
            texts.append(prompt + tokenizer.decode(new))
    return texts
