"""Every problem of a configuration, found before a process group, a weight or a download.

Import only after ``device.select_device``: this module imports torchtitan.
"""

import re
import tempfile
from pathlib import Path

from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.config.override import _resolve_target
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.trainer import Trainer

from npu_parallel.layout import Layout, ModelShape
from npu_parallel.layout import check as check_layout

from . import checkpoints
from .checkpoints import is_step_name
from .data import TextDataLoader, data_files, tokenize, too_short
from .errors import InputError

# Fields of npu_parallel.layout.Problem.where, as the options that set them.
_OPTION = {
    "dp_replicate": "--parallelism.data-parallel-replicate-degree",
    "dp_shard": "--parallelism.data-parallel-shard-degree",
    "cp": "--parallelism.context-parallel-degree",
    "tp": "--parallelism.tensor-parallel-degree",
    "pp": "--parallelism.pipeline-parallel-degree",
    "ep": "--parallelism.expert-parallel-degree",
    "seq_len": "--training.seq-len",
    "local_batch_size": "--training.local-batch-size",
    "global_batch_size": "--training.global-batch-size",
    "world_size": "--nproc",
}

# What a checkpoint holds besides the weights, by torchtitan's names.
_RUN_STATE = ("optimizer", "lr_scheduler", "dataloader", "train_state")


def model_shape(config: Trainer.Config) -> ModelShape | None:
    """The sizes of a decoder that limit how it can be split; None for another kind of model."""
    model = config.model_spec.model
    if not isinstance(model, Decoder.Config) or model.first_attention is None:
        return None
    attention = model.first_attention
    experts = next((node.num_experts for _, node, _, _ in model.traverse(GroupedExperts.Config)), 0)
    return ModelShape(
        n_layers=len(model.layers),
        n_heads=attention.n_heads,
        n_kv_heads=getattr(attention, "n_kv_heads", None),
        n_experts=experts,
    )


def _check_layout(config: Trainer.Config, world_size: int) -> list[str]:
    parallelism, training = config.parallelism, config.training
    layout = Layout(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
    )
    try:
        problems = check_layout(
            layout,
            world_size,
            model_shape(config),
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            global_batch_size=training.global_batch_size if training.global_batch_size > 0 else None,
            microbatch_size=parallelism.pipeline_parallel_microbatch_size,
            schedule=parallelism.pipeline_parallel_schedule,
            first_stage_less_layers=parallelism.pipeline_parallel_first_stage_less_layers,
            last_stage_less_layers=parallelism.pipeline_parallel_last_stage_less_layers,
            sequence_parallel=parallelism.enable_sequence_parallel,
            flex_attention=any(config.model_spec.model.traverse(FlexAttention.Config)),
        )
    except ValueError as error:
        return [f"the parallel layout cannot be read: {error}"]
    hints = {"world_size": " Or start another number of processes with --nproc."}
    return [f"{_OPTION.get(p.where, p.where)}: {p.what}. {p.fix}.{hints.get(p.where, '')}" for p in problems]


def _check_sizes(config: Trainer.Config) -> list[str]:
    sizes = {
        "--training.steps": config.training.steps,
        "--training.seq-len": config.training.seq_len,
        "--training.local-batch-size": config.training.local_batch_size,
        "--metrics.log-freq": config.metrics.log_freq,
    }
    if config.training.global_batch_size >= 0:
        sizes["--training.global-batch-size"] = config.training.global_batch_size
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        sizes["--loss.num-chunks"] = config.loss.num_chunks
    if config.validator.enable:
        sizes["--validator.freq"] = config.validator.freq
    return [f"{name} is {value}; it must be at least 1." for name, value in sizes.items() if value < 1]


def _check_lengths(config: Trainer.Config) -> list[str]:
    problems = []
    loss, local_length = config.loss, config.training.seq_len // max(1, config.parallelism.context_parallel_degree)
    if isinstance(loss, ChunkedLossWrapper.Config) and local_length % loss.num_chunks:
        problems.append(
            f"--training.seq-len: the loss takes the sequence of a rank in {loss.num_chunks} chunks, but it has "
            f"{local_length} tokens. Use a multiple of {loss.num_chunks} tokens a context-parallel rank, or change "
            "--loss.num-chunks."
        )
    try:
        longest = getattr(config.model_spec.model, "max_seq_len", None)
    except ValueError:
        # A decoder without rotary positions has no such limit.
        longest = None
    if longest and config.training.seq_len > longest:
        problems.append(
            f"--training.seq-len is {config.training.seq_len}, but the model's positions end at {longest}. "
            f"Use at most {longest}."
        )
    return problems


def _check_device(config: Trainer.Config, device_type: str) -> list[str]:
    if device_type != "cpu":
        return []
    refused = {
        "--training.enable-cpu-offload offloads to the host, where the parameters already are. Leave it out.": (
            config.training.enable_cpu_offload
        ),
        "--profiler.enable-memory-snapshot needs an accelerator's allocator. Leave it out.": (
            config.profiler.enable_memory_snapshot
        ),
        "--checkpoint.async-mode async_with_pinned_mem needs an accelerator. Use async or disabled.": (
            getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem"
        ),
    }
    return [f"on the CPU, {text}" for text, asked in refused.items() if asked]


def _check_overrides(config: Trainer.Config) -> list[str]:
    problems = []
    for entry in config.override.imports:
        name = entry if isinstance(entry, str) else entry[0]
        try:
            _resolve_target(name)
        except (ImportError, ValueError) as error:
            problems.append(f"--override.imports: {error}")
    return problems


def check_tokenizer(config: Trainer.Config) -> list[str]:
    """What is wrong with the tokenizer that ``config`` names."""
    return _load_tokenizer(config)[1]


def _load_tokenizer(config: Trainer.Config) -> tuple[BaseTokenizer | None, list[str]]:
    if not isinstance(config.tokenizer, HuggingFaceTokenizer.Config):
        return None, []
    folder = Path(config.hf_assets_path)
    names = ("tokenizer.json", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in names):
        return None, [
            f"no tokenizer in {folder}: none of {', '.join(names)} is there. "
            "Point --hf-assets-path at the folder with the model's tokenizer files."
        ]
    try:
        tokenizer = config.tokenizer.build(tokenizer_path=str(folder))
    # The tokenizers library raises a bare Exception for a damaged file.
    except Exception as error:
        return None, [f"the tokenizer in {folder} cannot be read ({error}). Download its files again."]
    vocab_size = getattr(config.model_spec.model, "vocab_size", None)
    if vocab_size is None or tokenizer.get_vocab_size() <= vocab_size:
        return tokenizer, []
    return tokenizer, [
        f"the tokenizer in {folder} has {tokenizer.get_vocab_size()} entries, the model's vocabulary only "
        f"{vocab_size}: ids beyond it would index outside the embedding. Choose the model's own tokenizer with "
        "--hf-assets-path."
    ]


def _data_parallel(config: Trainer.Config, world_size: int | None) -> int:
    others = (
        config.parallelism.tensor_parallel_degree
        * config.parallelism.context_parallel_degree
        * config.parallelism.pipeline_parallel_degree
    )
    return max(1, (world_size or 1) // max(1, others))


def _check_tokenizer_and_data(config: Trainer.Config, world_size: int | None) -> list[str]:
    tokenizer, problems = _load_tokenizer(config)
    folder = Path(config.hf_assets_path)
    loaders = {"": config.dataloader}
    if config.validator.enable:
        loaders["validation: "] = config.validator.dataloader
    for prefix, loader in loaders.items():
        if not isinstance(loader, TextDataLoader.Config):
            continue
        if not loader.dataset_path:
            problems.append(f"{prefix}no data is named. Give --data a .txt, .jsonl or .parquet file.")
            continue
        if tokenizer is None:
            # Without a tokenizer only the file itself can be looked at.
            try:
                data_files(loader.dataset_path)
            except InputError as error:
                problems += [prefix + problem for problem in error.problems]
            continue
        try:
            tokens = tokenize(loader.dataset_path, tokenizer, str(folder), loader.text_field)
        except InputError as error:
            problems += [prefix + problem for problem in error.problems]
            continue
        infinite = loader.infinite if not prefix else config.validator.steps != -1
        rows = 1 if infinite else config.training.local_batch_size * _data_parallel(config, world_size)
        if tokens.rows(config.training.seq_len) < rows:
            problems.append(prefix + too_short(loader.dataset_path, len(tokens.tokens), config.training.seq_len, rows))
    return problems


def _check_output(folder: Path) -> list[str]:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"the output folder {folder} cannot be made: {existing} is a file. Choose another --dump-folder."]
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return [
            f"the output folder {folder} cannot be written ({existing}: {error.strerror}). "
            "Choose another --dump-folder or change its permissions."
        ]
    return []


def _check_checkpoints(config: Trainer.Config, world_size: int | None, resume: bool) -> list[str]:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        asked = {
            "--resume": resume,
            "--checkpoint.load-step": checkpoint.load_step != -1,
            "--checkpoint.create-seed-checkpoint": checkpoint.create_seed_checkpoint,
        }
        return [
            f"{name} needs checkpoints, which are off. Add --checkpoint.enable." for name, on in asked.items() if on
        ]
    if not isinstance(checkpoint, CheckpointManager.Config):
        return []
    if checkpoint.create_seed_checkpoint and world_size not in (None, 1):
        return ["--checkpoint.create-seed-checkpoint makes an unsharded checkpoint. Run it with --nproc 1."]
    unknown = [name for name in checkpoint.exclude_from_loading if name not in _RUN_STATE]
    problems = [
        f"--checkpoint.exclude-from-loading: there is no part '{name}'. Choose among: {', '.join(_RUN_STATE)}."
        for name in unknown
    ]
    folder = Path(config.dump_folder) / checkpoint.folder
    found = checkpoints.find_checkpoints(folder)
    whole = [c for c in found if c.complete]
    steps = ", ".join(str(c.step) for c in whole) or "none"
    # torchtitan takes "step-7" anywhere in a name for the checkpoint of step 7, and then does not find it.
    astray = [p.name for p in folder.glob("*step-*") if re.search(r"step-\d", p.name) and not is_step_name(p.name)]
    problems += [
        f"{folder / name} looks like a checkpoint to torchtitan, but is not called step-N. Move it out of {folder}."
        for name in astray
    ]
    if checkpoint.load_step != -1:
        wanted = next((c for c in found if c.step == checkpoint.load_step), None)
        if wanted is None:
            problems.append(
                f"no checkpoint of step {checkpoint.load_step} in {folder}. Whole ones there: {steps}. "
                "Choose one with --checkpoint.load-step, or leave it out for the newest."
            )
        elif not wanted.complete:
            problems.append(
                f"the checkpoint {wanted.path} cannot be loaded: {wanted.problem}. Whole ones there: {steps}."
            )
        return problems + (_check_loadable(wanted, checkpoint) if wanted and wanted.complete else [])
    finished = [c for c in found if c.complete or c.damaged]
    if finished and finished[-1].damaged:
        newest = finished[-1]
        problems.append(
            f"the checkpoint {newest.path} is damaged: {newest.problem}. Whole ones there: {steps}. "
            f"Delete it or move it out of {folder}"
            + (f", or add --checkpoint.load-step {whole[-1].step}." if whole else " to start over.")
        )
    elif finished:
        problems += _check_loadable(finished[-1], checkpoint)
    elif resume:
        problems.append(
            f"--resume: no whole checkpoint in {folder}. Start without --resume, or name the run's folder with "
            "--dump-folder."
        )
    else:
        problems += _check_initial(checkpoint)
    return problems


def _check_loadable(found: checkpoints.Checkpoint, checkpoint: CheckpointManager.Config) -> list[str]:
    """A run can be continued only from more than the weights, or from the weights of step 0."""
    needed = set(_RUN_STATE) - set(checkpoint.exclude_from_loading)
    if found.step == 0 or not needed or not checkpoints.holds_weights_only(found.path):
        return []
    return [
        f"the checkpoint {found.path} holds only weights, so a run cannot be continued from it. Start a new one from "
        f"them: --checkpoint.initial-load-path {found.path.resolve()} with another --dump-folder."
    ]


def _check_initial(checkpoint: BaseCheckpointManager.Config) -> list[str]:
    path = checkpoint.initial_load_path
    if not path or "://" in path:
        return []
    if not Path(path).is_dir():
        return [f"--checkpoint.initial-load-path: there is no folder {path}. Name the step-N folder of a checkpoint."]
    if checkpoint.initial_load_in_hf and not (Path(path) / "model.safetensors.index.json").is_file():
        # One unsharded .safetensors file has no index; torchtitan reads it as it is.
        return []
    problem = checkpoints.inspect(path)
    return [f"--checkpoint.initial-load-path: {path} cannot be loaded: {problem}."] if problem else []


def check(config: Trainer.Config, device_type: str, world_size: int | None, *, resume: bool = False) -> list[str]:
    """All problems of ``config``, one paragraph each.

    Args:
        config: The parsed configuration, fitted to the device.
        device_type: ``"npu"``, ``"cuda"`` or ``"cpu"``.
        world_size: Processes of the run, or None where it is not known yet; the layout is then not checked.
        resume: Whether an existing checkpoint is asked for.
    """
    problems = _check_sizes(config)
    if not problems:
        problems += _check_lengths(config)
        problems += [] if world_size is None else _check_layout(config, world_size)
    return (
        problems
        + _check_device(config, device_type)
        + _check_overrides(config)
        + (_check_tokenizer_and_data(config, world_size) if config.training.seq_len > 0 else [])
        + _check_output(Path(config.dump_folder))
        + _check_checkpoints(config, world_size, resume)
    )
