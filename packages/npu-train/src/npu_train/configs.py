"""From a command line to a ``Trainer.Config`` that fits the device, through torchtitan's own seams.

Import only after ``device.select_device``: this module imports torchtitan.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import spmd_types._dist
import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager, derive
from torchtitan.config.override import _REGISTRY as override_registry
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

import npu_parallel.gloo
from npu_parallel.init import layout_independent_init

from .data import TextDataLoader
from .errors import InputError, near
from .files import SUFFIXES, not_read
from .recipe_configs import QUICKSTART_DATA
from .trainer import NpuTrainer

# Assets of torchtitan's debug configurations, which its source repository holds and its package does not.
_REPOSITORY_TOKENIZER = "./tests/assets/tokenizer"
_REPOSITORY_DATASETS = ("c4_test",)


# torchtitan's own devices have their own kernels; the others get plain-PyTorch attention and gloo-safe collectives.
_NATIVE_DEVICES = ("cuda",)

_METRICS = "npu_train.overrides.metrics.run_metrics"
_CHECKPOINT = "npu_train.overrides.checkpoint.reporting_checkpoint"
_ATTENTION = {
    FlexAttention.Config: "npu_train.overrides.attention.masked_flex_attention",
    VarlenAttention.Config: "npu_train.overrides.attention.document_varlen_attention",
}


@contextlib.contextmanager
def _terminal_width(columns: int) -> Iterator[None]:
    # tyro wraps its messages at the terminal's width; unwrapped they can be read back.
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _tyro_problem(text: str) -> str:
    """One sentence out of tyro's box of an error."""
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines() if "│" in line]
    sections: list[list[str]] = [[]]
    for line in lines:
        if line and set(line) == {"─"}:
            sections.append([])
        else:
            sections[-1].append(line)
    message = " ".join(line for line in sections[0] if line).rstrip(".")
    nearby = [
        match.group(0)
        for section in sections[1:]
        if section and section[0].startswith("Perhaps you meant")
        for line in section
        if (match := re.match(r"--[\w.-]+", line))
    ]
    hint = f" Perhaps you meant: {', '.join(dict.fromkeys(nearby))}." if nearby else ""
    return f"{message or text.strip()}.{hint} Every option is listed by adding --help to the command."


def _check_registry(module: str, config: str) -> Callable[[], Any]:
    """The configuration function; an unknown module or configuration is refused with the near matches."""
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    known = sorted(_supported_models | _supported_experiments)
    if not all(part.isidentifier() for part in module.split(".")):
        raise InputError(
            f"'{module}' given to --module is no module name. Give a short name ({near(module, known)}) or the dotted "
            "path of a package that can be imported, such as mine.models.llama."
        )
    if module in _supported_models:
        candidates = [f"torchtitan.models.{module}.config_registry"]
    elif module in _supported_experiments:
        candidates = [f"torchtitan.experiments.{infix}{module}.config_registry" for infix in ("", "rl.examples.")]
    elif "." in module:
        candidates = [f"{module}.config_registry", module]
    else:
        raise InputError(
            f"unknown module '{module}' given to --module. Near matches: {near(module, known)}. "
            "A dotted path to a package with a config_registry works too."
        )
    errors = []
    for candidate in candidates:
        try:
            registry = importlib.import_module(candidate)
            break
        except ImportError as error:
            errors.append(error)
    else:
        missing = next((e.name for e in errors if e.name and not candidates[0].startswith(e.name)), None)
        if missing and not missing.startswith(module.split(".")[0]):
            raise InputError(
                f"the module '{module}' needs the package '{missing}', which is not installed. pip install {missing}"
            )
        raise InputError(f"the module '{module}' given to --module cannot be imported: {errors[-1]}.")
    function = getattr(registry, config, None)
    if not callable(function):
        known = [
            name
            for name, value in vars(registry).items()
            if inspect.isfunction(value) and value.__module__ == registry.__name__ and not name.startswith("_")
        ]
        raise InputError(
            f"unknown configuration '{config}' given to --config: module '{module}' has no such function. "
            f"Near matches: {near(config, known)}."
        )
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"--config: '{config}' of module '{module}' is no configuration function ({error}). Name one that takes no "
            "arguments and returns a Trainer.Config."
        ) from error
    return function


def parse(module: str, config: str, options: list[str], device_type: str) -> Trainer.Config:
    """Build the configuration ``config`` of the registry ``module`` and apply torchtitan's command-line options.

    Args:
        module: torchtitan's ``--module``: a short name or a dotted path.
        config: torchtitan's ``--config``: a function of that registry.
        options: torchtitan's options, as on its own command line.
        device_type: The device that the run will use.

    Raises:
        InputError: an unknown module, configuration or option, or a value that the configuration refuses.
        SystemExit: ``options`` ask for help, which has been printed.
    """
    function = _check_registry(module, config)
    args = ["--module", module, "--config", config, *options]
    if device_type not in _NATIVE_DEVICES:
        # torchtitan refuses pipeline and expert parallelism while CUDA graphs are on, which is its default everywhere.
        args[4:4] = ["--training.disable-cuda-graphs"]
    if "-h" in options or "--help" in options:
        ConfigManager().parse_args(args)
    # tyro draws its boxes by the stream's encoding; they are read back below.
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    upstream_log = logging.getLogger()
    level = upstream_log.level
    try:
        # Parsing warns about things that are checked, and said once, in check.py.
        upstream_log.setLevel(logging.ERROR)
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output), _terminal_width(4000):
            made = function()
            if not isinstance(made, Trainer.Config):
                raise ValueError(f"the function returns {type(made).__qualname__}, not a Trainer.Config")
            parsed = ConfigManager().parse_args(args)
    except SystemExit:
        raise InputError(_tyro_problem(output.buffer.getvalue().decode())) from None
    except (AssertionError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise InputError(f"the configuration '{config}' of module '{module}' is refused: {error}") from error
    finally:
        upstream_log.setLevel(level)
    # A registry with a trainer of its own (flux) keeps it; fit_to_device says so.
    return derive(parsed, NpuTrainer.Config) if type(parsed) is Trainer.Config else parsed


def use_data(config: Trainer.Config, path: str, text_field: str = "") -> list[str]:
    """Train on the user's own file; return what to tell them.

    Raises:
        InputError: the configuration does not train on plain text.
    """
    loader = config.dataloader
    if not isinstance(loader, (TextDataLoader.Config, HuggingFaceTextDataLoader.Config)):
        raise InputError(
            "--data is for training on plain text, but this configuration reads its data with "
            f"{type(loader).__qualname__}. Leave --data out and use that loader's own options."
        )
    if not isinstance(loader, TextDataLoader.Config):
        loader = TextDataLoader.Config()
    config.dataloader = dataclasses.replace(
        loader, dataset_path=os.path.abspath(os.path.expanduser(path)), text_field=text_field or loader.text_field
    )
    notes = []
    # A problem with the data itself is told by check.py.
    with contextlib.suppress(InputError):
        left_out = not_read(path)
        if left_out:
            shown = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if left_out[5:] else "")
            notes.append(
                f"in {path}, {shown} is not read: only {', '.join(SUFFIXES)} files are, not those of subfolders."
            )
    if not config.validator.enable:
        return notes
    held_out = config.validator.dataloader
    if isinstance(held_out, TextDataLoader.Config) and not (held_out.dataset_path or "").startswith(
        str(QUICKSTART_DATA)
    ):
        return notes
    config.validator.enable = False
    return [*notes, "validation is off: the configuration's held-out text does not belong to your data."]


def _replace_repository_assets(config: Trainer.Config) -> list[str]:
    """Stand in for the test assets that torchtitan's package does not ship."""
    notes = []
    if config.hf_assets_path == _REPOSITORY_TOKENIZER and not os.path.exists(_REPOSITORY_TOKENIZER):
        config.hf_assets_path = str(QUICKSTART_DATA / "tokenizer")
        notes.append(
            f"{_REPOSITORY_TOKENIZER} exists only in torchtitan's source repository: "
            "the quickstart tokenizer is used (--hf-assets-path chooses another)."
        )

    def stand_in(loader: Any, file: str) -> Any:
        absent = (
            isinstance(loader, HuggingFaceTextDataLoader.Config)
            and loader.dataset in _REPOSITORY_DATASETS
            and not os.path.exists(loader.dataset_path or f"tests/assets/{loader.dataset}")
        )
        if not absent:
            return loader
        notes.append(
            f"the data set {loader.dataset} exists only in torchtitan's source repository: "
            f"the quickstart {file} is used (--data chooses another)."
        )
        return TextDataLoader.Config(dataset_path=str(QUICKSTART_DATA / file), infinite=loader.infinite)

    config.dataloader = stand_in(config.dataloader, "corpus.jsonl")
    if config.validator.enable:
        config.validator.dataloader = stand_in(config.validator.dataloader, "validation.jsonl")
    return notes


def _imported_targets(config: Trainer.Config) -> list[str]:
    return [entry if isinstance(entry, str) else entry[0] for entry in config.override.imports]


def _claimed_by_user(config: Trainer.Config, target: type) -> bool:
    """Whether an override that the user listed replaces nodes of ``target`` already."""
    for name in _imported_targets(config):
        module, _, _function = name.rpartition(".")
        try:
            importlib.import_module(module)
        except (ImportError, ValueError):
            # check.py reports it.
            continue
        registered = override_registry.get(name)
        if registered is not None and issubclass(target, registered.target_cls):
            return True
    return False


def _add_override(config: Trainer.Config, target: type, name: str) -> str | None:
    """Activate an override of ours where it has nodes to replace; return a note where the user's own is used."""
    if name in _imported_targets(config) or not any(type(node) is target for _, node, _, _ in config.traverse(target)):
        return None
    if _claimed_by_user(config, target):
        return f"your override of {target.__qualname__} is used in place of {name}."
    config.override.imports = [*config.override.imports, name]
    return None


def _sum_reductions(parallelize: Callable) -> Callable:
    @functools.wraps(parallelize)
    def wrapped(model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        model = parallelize(model, **kwargs)
        npu_parallel.gloo.force_sum_reduction(model)
        return model

    return wrapped


def _make_init_independent_of_layout(config: Trainer.Config) -> None:
    """Draw sharded parameters from the 1-process stream: the CPU has no random-number tracker of DTensor."""
    seen: set[int] = set()
    for _, node, _, _ in config.model_spec.model.traverse(Module.Config, recurse=True):
        if node.param_init and id(node) not in seen:
            seen.add(id(node))
            node.param_init = {name: layout_independent_init(init) for name, init in node.param_init.items()}


def fit_to_device(config: Trainer.Config, device_type: str) -> list[str]:
    """Adapt ``config`` in place so that it runs on the device; return what to tell the user.

    Everything goes through torchtitan's own extension points: overrides, ``ModelSpec`` and ``param_init``.
    """
    notes = _replace_repository_assets(config)
    targets = {MetricsProcessor.Config: _METRICS, CheckpointManager.Config: _CHECKPOINT}
    if device_type not in _NATIVE_DEVICES:
        targets |= _ATTENTION
        config.model_spec = dataclasses.replace(
            config.model_spec, parallelize_fn=_sum_reductions(config.model_spec.parallelize_fn)
        )
        if not config.compile.enable:
            # torchtitan compiles the block mask even in eager runs, at a minute's cost; eager it takes milliseconds.
            torch.compiler.set_stance("force_eager")
    if device_type == "cpu":
        if config.training.mixed_precision_param == "bfloat16" and any(
            config.model_spec.model.traverse(TokenChoiceTopKRouter.Config)
        ):
            notes.append("the routers' gates run in bfloat16: torch has no float32 autocast on the CPU.")
        if config.training.mixed_precision_param == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            notes.append(
                "this CPU has no bfloat16 instructions, so bfloat16 is many times slower than float32 here: "
                "--training.mixed-precision-param float32 avoids it."
            )
        _make_init_independent_of_layout(config)
        spmd_types._dist.set_dist(npu_parallel.gloo.dist_with_list_all_to_all())
    if not isinstance(config, NpuTrainer.Config):
        notes.append(
            f"{type(config).__qualname__} is used as it is: a NaN does not stop the run before the weights change."
        )
    notes += [note for target, name in targets.items() if (note := _add_override(config, target, name))]
    return notes
