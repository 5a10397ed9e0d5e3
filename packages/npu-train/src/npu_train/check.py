"""Every problem of a configuration, found before a process group, a weight or a download.

Import only after ``device.select_device``: this module imports torchtitan.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.config.override import _resolve_active, _resolve_target
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.trainer import Trainer

from npu_parallel.layout import SCHEDULES, Layout, ModelShape
from npu_parallel.layout import check as check_layout

from . import checkpoints
from .checkpoints import is_step_name
from .data import TextDataLoader, tokenize, too_short
from .errors import InputError
from .files import data_files, unwritable

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

# What a run writes into its folder besides checkpoints.
_RUN_FILES = (".lock", "metrics.jsonl", "run.json")


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
        "--training.gc-freq": config.training.gc_freq,
        "--metrics.log-freq": config.metrics.log_freq,
        "--comm.init-timeout-seconds": config.comm.init_timeout_seconds,
        "--comm.train-timeout-seconds": config.comm.train_timeout_seconds,
    }
    if config.training.global_batch_size >= 0:
        sizes["--training.global-batch-size"] = config.training.global_batch_size
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        sizes["--loss.num-chunks"] = config.loss.num_chunks
    if config.validator.enable:
        sizes["--validator.freq"] = config.validator.freq
    if config.profiler.enable_profiling:
        sizes["--profiler.profiler-active"] = config.profiler.profiler_active
    if config.profiler.enable_profiling or config.profiler.enable_memory_snapshot:
        sizes["--profiler.profile-freq"] = config.profiler.profile_freq
    return [f"{name} is {value}; it must be at least 1." for name, value in sizes.items() if value < 1]


def _is_number(value: Any, least: float, below: float = math.inf) -> bool:
    # Booleans are numbers to Python alone.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < below


def _check_values(config: Trainer.Config) -> list[str]:
    """Numbers that torchtitan takes and that fail later, or train something else than they seem to."""
    training, schedule, seed = config.training, config.lr_scheduler, config.debug.seed
    balancer = config.parallelism.context_parallel_load_balancer
    # Option, value, whether it will do, and what would.
    rules: list[tuple[str, Any, bool, str]] = [
        (
            "--training.max-norm",
            training.max_norm,
            training.max_norm > 0,
            "above 0: gradients whose norm is larger are scaled down to it. inf leaves all as they are",
        ),
        ("--lr-scheduler.warmup-steps", schedule.warmup_steps, schedule.warmup_steps >= 0, "at least 0"),
        (
            "--lr-scheduler.total-steps",
            schedule.total_steps,
            schedule.total_steps is None or schedule.total_steps >= training.steps,
            f"at least --training.steps ({training.steps}): the schedule ends there",
        ),
        (
            "--lr-scheduler.decay-ratio",
            schedule.decay_ratio,
            schedule.decay_ratio is None or 0 <= schedule.decay_ratio <= 1,
            "a share of the steps, from 0 to 1",
        ),
        (
            "--lr-scheduler.min-lr-factor",
            schedule.min_lr_factor,
            0 <= schedule.min_lr_factor <= 1,
            "a share of the learning rate, from 0 to 1",
        ),
        ("--debug.seed", seed, seed is None or 0 <= seed < 2**64, "from 0 to 2**64 - 1"),
        (
            "--parallelism.context-parallel-load-balancer",
            balancer,
            balancer in (None, "headtail", "ptrr"),
            "headtail, ptrr or None",
        ),
    ]
    profiler = config.profiler
    if profiler.enable_profiling:
        warmup, cycle = profiler.profiler_warmup, profiler.profiler_warmup + profiler.profiler_active
        rules += [
            ("--profiler.profiler-warmup", warmup, warmup >= 0, "at least 0"),
            (
                "--profiler.profile-freq",
                profiler.profile_freq,
                profiler.profile_freq >= cycle,
                f"at least --profiler.profiler-warmup + --profiler.profiler-active = {cycle}",
            ),
        ]
    loss = config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss
    vocab_size = getattr(config.model_spec.model, "vocab_size", None)
    if isinstance(loss, CrossEntropyLoss.Config) and None not in (vocab_size, loss.global_vocab_size):
        name = "--loss.global-vocab-size" if loss is config.loss else "--loss.loss-fn.global-vocab-size"
        fine = loss.global_vocab_size == vocab_size
        rules.append((name, loss.global_vocab_size, fine, f"the model's vocabulary, {vocab_size}"))
    for number, group in enumerate(config.optimizer.param_groups):
        for key, value in group.optimizer_kwargs.items():
            if key in _OPTIMIZER_RULES:
                fine, must = _OPTIMIZER_RULES[key]
                option = f"--optimizer.param-groups.{number}.optimizer-kwargs.{key.replace('_', '-')}"
                rules.append((option, value, fine(value), must))
    return [f"{option} is {value}; it must be {must}." for option, value, fine, must in rules if not fine]


# Argument of an optimizer: whether a value will do, and what would.
_OPTIMIZER_RULES = {
    "lr": (lambda value: _is_number(value, 0), "a finite number, at least 0"),
    "eps": (lambda value: _is_number(value, 0), "a finite number, at least 0"),
    "weight_decay": (lambda value: _is_number(value, 0), "a finite number, at least 0"),
    "betas": (
        lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(b, 0, 1) for b in value),
        "two numbers, each from 0 to below 1",
    ),
}


def _modules(config: Trainer.Config) -> torch.nn.Module:
    with torch.device("meta"):
        return config.model_spec.model.build()


def _check_param_groups(config: Trainer.Config) -> list[str]:
    problems, patterns = [], []
    for number, group in enumerate(config.optimizer.param_groups):
        try:
            patterns.append(re.compile(group.pattern))
        except re.error as error:
            problems.append(
                f"--optimizer.param-groups.{number}.pattern: '{group.pattern}' is no regular expression ({error})."
            )
    # Overrides of the user's may give the model other parameters.
    foreign = any(not name.startswith("npu_train.") for name in _override_names(config))
    if problems or foreign or [pattern.pattern for pattern in patterns] == [".*"]:
        return problems
    left = [name for name, parameter in _modules(config).named_parameters() if parameter.requires_grad]
    for number, pattern in enumerate(patterns):
        rest = [name for name in left if not pattern.search(name)]
        if len(rest) == len(left):
            problems.append(
                f"--optimizer.param-groups.{number}.pattern: '{pattern.pattern}' matches no parameter that those "
                f"before it have left ({left[0] if left else 'none'}, for example)."
            )
        left = rest
    if left:
        problems.append(
            f"no pattern of --optimizer.param-groups matches {left[0]} ({len(left)} parameters in all are left out). "
            "Add a last group with the pattern '.*'."
        )
    return problems


def _check_stages(config: Trainer.Config) -> list[str]:
    """torchtitan's own rules about explicit pipeline stages, which it applies once the processes have met."""
    parallelism, pp = config.parallelism, config.parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    per_rank = next((n for name, (n, _) in SCHEDULES.items() if name.lower() == schedule.lower()), None)
    if pp <= 1 or per_rank is None:
        return []
    problems = []
    schedule_file = parallelism.pipeline_parallel_schedule_csv
    if schedule_file and not os.path.isfile(schedule_file):
        problems.append(f"--parallelism.pipeline-parallel-schedule-csv: there is no file {schedule_file}.")
    stages, option = None, ""
    wanted, size = parallelism.module_fqns_per_model_part, parallelism.pipeline_parallel_layers_per_stage
    if wanted is not None:
        stages, option = len(wanted), "--parallelism.module-fqns-per-model-part"
        model = _modules(config)
        known = [name for name, _ in model.named_children() if name != "layers"]
        known += [f"layers.{name}" for name, _ in getattr(model, "layers", torch.nn.ModuleList()).named_children()]
        named = [name for part in wanted for name in part]
        for what, names in (
            ("the model has no", [name for name in named if name not in known]),
            ("no stage holds", [name for name in known if name not in named]),
        ):
            if names:
                problems.append(f"{option}: {what} {', '.join(names)}. The model's parts: {', '.join(known)}.")
    elif size is not None:
        option = "--parallelism.pipeline-parallel-layers-per-stage"
        if size < 1:
            return [*problems, f"{option} is {size}; it must be at least 1."]
        shape = model_shape(config)
        layers = shape.n_layers if shape is not None else 0
        ends = (
            parallelism.pipeline_parallel_first_stage_less_layers + parallelism.pipeline_parallel_last_stage_less_layers
        )
        stages = math.ceil((layers + ends) / size) if layers else None
    if stages is not None and (stages % pp or (stages != pp if per_rank == 1 else stages < 2 * pp)):
        fits = f"{pp}" if per_rank == 1 else f"a multiple of {pp}, at least {2 * pp}"
        problems.append(f"{option} makes {stages} pipeline stages; {schedule} on {pp} ranks needs {fits}.")
    return problems


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


def _override_names(config: Trainer.Config) -> list[str]:
    return [entry if isinstance(entry, str) else entry[0] for entry in config.override.imports]


def _check_overrides(config: Trainer.Config) -> list[str]:
    problems, targets = [], []
    for name in _override_names(config):
        try:
            targets.append((*_resolve_target(name), {}))
            _resolve_active(targets)
        except (ImportError, ValueError) as error:
            problems.append(f"--override.imports: {error}")
            targets = []
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


def _checkpoint_folder(config: Trainer.Config) -> Path:
    return Path(config.dump_folder) / config.checkpoint.folder


def _check_outputs(config: Trainer.Config) -> list[str]:
    problems = unwritable(Path(config.dump_folder))
    if problems or not config.checkpoint.enable or "://" in config.checkpoint.folder:
        return problems
    folder = _checkpoint_folder(config)
    if folder.parent == Path(config.dump_folder) and folder.name in _RUN_FILES:
        return [f"--checkpoint.folder: {folder.name} is a file of the run's own. Choose another name."]
    return unwritable(folder, "checkpoint folder", "--checkpoint.folder")


def _check_checkpoints(config: Trainer.Config, world_size: int | None, resume: bool) -> list[str]:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        asked = {
            "--resume": resume,
            "--checkpoint.load-step": checkpoint.load_step != -1,
            "--checkpoint.create-seed-checkpoint": checkpoint.create_seed_checkpoint,
            "--checkpoint.initial-load-path": checkpoint.initial_load_path is not None,
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
    folder = _checkpoint_folder(config)
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
        return problems + (_check_loadable(wanted, config) if wanted and wanted.complete else [])
    finished = [c for c in found if c.complete or c.damaged]
    if finished and finished[-1].damaged:
        newest = finished[-1]
        problems.append(
            f"the checkpoint {newest.path} is damaged: {newest.problem}. Whole ones there: {steps}. "
            f"Delete it or move it out of {folder}"
            + (f", or add --checkpoint.load-step {whole[-1].step}." if whole else " to start over.")
        )
    elif finished and finished[-1].step and not (resume or _is_restart()):
        problems.append(
            f"{config.dump_folder} holds an earlier run, up to {finished[-1].path.name}. Add --resume to continue it, "
            "or choose another --dump-folder for a new run."
        )
    elif finished:
        problems += _check_loadable(finished[-1], config)
    elif resume:
        problems.append(
            f"--resume: no whole checkpoint in {folder}. Start without --resume, or name the run's folder with "
            "--dump-folder."
        )
    else:
        problems += _check_initial(config)
    return problems


def _is_restart() -> bool:
    """Whether torchrun has started this process again after a failure (``--max-restarts``): it goes on by itself."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def nothing_left(config: Trainer.Config) -> str | None:
    """What to tell where the checkpoint that a run goes on from is at its last step already, else None."""
    checkpoint, steps = config.checkpoint, config.training.steps
    if not isinstance(checkpoint, CheckpointManager.Config) or not checkpoint.enable:
        return None
    if checkpoint.create_seed_checkpoint or "train_state" in checkpoint.exclude_from_loading:
        return None
    whole = [c for c in checkpoints.find_checkpoints(_checkpoint_folder(config)) if c.complete]
    start = next((c for c in reversed(whole) if checkpoint.load_step in (-1, c.step)), None)
    if start is None or start.step != steps:
        return None
    return f"nothing to do: the checkpoint {start.path} is at step {steps} of {steps}. Give more --training.steps."


def _check_loadable(found: checkpoints.Checkpoint, config: Trainer.Config) -> list[str]:
    """A run can be continued only from more than the weights, or from the weights of step 0, and not backwards."""
    checkpoint, steps = config.checkpoint, config.training.steps
    if found.step > steps and "train_state" not in checkpoint.exclude_from_loading:
        return [
            f"--training.steps is {steps}, but the checkpoint {found.path} is at step {found.step} already: steps "
            "count from the start of the run. Give more, or choose an earlier checkpoint with --checkpoint.load-step."
        ]
    needed = set(_RUN_STATE) - set(checkpoint.exclude_from_loading)
    if found.step == 0 or not needed or not checkpoints.holds_weights_only(found.path):
        return []
    return [
        f"the checkpoint {found.path} holds only weights, so a run cannot be continued from it. Start a new one from "
        f"them: --checkpoint.initial-load-path {found.path.resolve()} with another --dump-folder."
    ]


def _check_initial(config: Trainer.Config) -> list[str]:
    checkpoint, path = config.checkpoint, config.checkpoint.initial_load_path
    option = "--checkpoint.initial-load-path"
    if path is not None and not path:
        return [f"the value of {option} is empty. Is a shell variable not set?"]
    if checkpoint.initial_load_in_hf and config.model_spec.state_dict_adapter is None:
        return [
            f"--checkpoint.initial-load-in-hf: {config.model_spec.name} has no mapping from Hugging Face's names. "
            "Load a checkpoint of torchtitan."
        ]
    if path is None and not checkpoint.initial_load_in_hf:
        return []
    if path is None:
        path, option = config.hf_assets_path, "--hf-assets-path"
    if "://" in path:
        return []
    if not Path(path).is_dir():
        return [f"{option}: there is no folder {path}. Name the step-N folder of a checkpoint."]
    if checkpoint.initial_load_in_hf and not checkpoints.holds_safetensors(path):
        leave = (Path(path) / ".metadata").is_file()
        return [
            f"{option}: {path} holds no .safetensors files, which --checkpoint.initial-load-in-hf asks for. "
            + ("It is a checkpoint of torchtitan: leave that out." if leave else "Name the folder of the weights.")
        ]
    if not checkpoint.initial_load_in_hf and not (Path(path) / ".metadata").is_file():
        if checkpoints.holds_safetensors(path):
            return [f"{option}: {path} holds Hugging Face's safetensors. Add --checkpoint.initial-load-in-hf."]
        return [f"{option}: {path} is no checkpoint (it has no .metadata). Name the step-N folder of a finished one."]
    problem = checkpoints.inspect(path)
    return [f"{option}: {path} cannot be loaded: {problem}."] if problem else []


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
    problems += _check_values(config) + _check_stages(config)
    return (
        problems
        + _check_device(config, device_type)
        + _check_overrides(config)
        + _check_param_groups(config)
        + (_check_tokenizer_and_data(config, world_size) if config.training.seq_len > 0 else [])
        + _check_outputs(config)
        + _check_checkpoints(config, world_size, resume)
    )
