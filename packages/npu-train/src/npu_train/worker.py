"""One training process: device, configuration, checks, torchtitan's trainer."""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import EXIT_DONE, EXIT_PROBLEM, EXIT_UNUSABLE_INPUT, InputError, RunFailed, report
from .files import path_problems
from .lock import locked
from .request import RunRequest

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

    from .device import Device

RUN_FILE = "run.json"


def configure(request: RunRequest) -> "tuple[Trainer.Config, Device]":
    """Select the device and build the configuration that fits it; the device's notes say what differs.

    Raises:
        InputError: the device, the configuration or an option is unknown.
    """
    from .console import set_up_logging
    from .device import select_device

    set_up_logging(request.verbose, int(os.environ.get("RANK", "0")))
    device = select_device(request.device)
    # Imports torchtitan, which must find the device chosen.
    from . import configs

    config = configs.parse(request.module, request.config, list(request.options), device.type)
    if request.dump_folder:
        config.dump_folder = request.dump_folder
    if request.data:
        device.notes.extend(configs.use_data(config, request.data, request.text_field))
    device.notes.extend(configs.fit_to_device(config, device.type))
    return config, device


def prepare(
    request: RunRequest, world_size: int | None, *, announce: bool, found: Sequence[str] = ()
) -> "Trainer.Config":
    """``configure`` and check everything.

    Args:
        request: The run.
        world_size: Its processes, or None where that is not known yet.
        announce: Whether to print what differs from what was asked for.
        found: Problems found already, to be told with the others.

    Raises:
        InputError: with every problem found.
    """
    from .console import say

    try:
        config, device = configure(request)
    except InputError as error:
        paths = path_problems(request.data, request.dump_folder, request.options)
        raise InputError(*found, *error.problems, *paths) from error
    from .check import check

    problems = [*found, *check(config, device.type, world_size, resume=request.resume)]
    if problems:
        raise InputError(*problems)
    if announce:
        for note in device.notes:
            say(f"note: {note}")
    return config


def tell_nothing_left(config: "Trainer.Config", *, announce: bool) -> bool:
    """Whether the checkpoint to go on from is at the last step already; says so."""
    from .check import nothing_left
    from .console import say

    told = nothing_left(config)
    if told is not None and announce:
        say(told)
    return told is not None


def request_of_run(path: Path) -> RunRequest:
    """The request recorded in the run folder that ``path`` is, or is in.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    path = path.expanduser().resolve()
    for folder in (path, *list(path.parents)[:2]):
        file = folder / RUN_FILE
        if file.is_file():
            try:
                fields = json.loads(file.read_text())
                fields.pop("npu_train", None)
                return RunRequest.from_json(json.dumps(fields))
            except (TypeError, ValueError, KeyError) as error:
                raise InputError(
                    f"{file} cannot be read ({error}). Name the model with --module and --config."
                ) from None
    raise InputError(
        f"no {RUN_FILE} in {path} or above it, so the model is not known. Name it with --module and --config."
    )


def _write_run_file(config: "Trainer.Config", request: RunRequest) -> None:
    """Record how the run was configured, for ``sample`` and for people."""
    folder = Path(config.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"npu_train": __version__, **request.to_dict()}
    unfinished = folder / f".{RUN_FILE}.{os.getpid()}"
    unfinished.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    unfinished.rename(folder / RUN_FILE)


def kept(config: "Trainer.Config | None") -> str:
    """What a run that ended early has left to go on from, as a sentence."""
    from .checkpoints import latest

    enabled = config is not None and config.checkpoint.enable
    newest = latest(Path(config.dump_folder) / config.checkpoint.folder) if enabled else None
    if newest is None:
        return "There is no checkpoint of this run."
    return f"The checkpoint {newest.path} is kept: continue with the same command and --resume."


def _train(config: "Trainer.Config", request: RunRequest) -> None:
    import torch
    from torchtitan.observability import structured_logger as sl

    from .console import say

    announce = int(os.environ["RANK"]) == 0
    sl.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    if announce:
        _write_run_file(config, request)
    trainer = None
    try:
        trainer = config.build()
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            if announce:
                say(_headline(trainer))
            trainer.train()
            events = getattr(trainer.metrics_processor, "events", None)
            if events is not None and trainer.step >= config.training.steps:
                events.write(event="end", step=trainer.step)
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _headline(trainer: Any) -> str:
    from torchtitan.tools import utils

    config, dims = trainer.config, trainer.parallel_dims
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    degrees = [(name, getattr(dims, name)) for name in names]
    layout = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "1 process"
    parameters = sum(p.numel() for part in trainer.model_parts for p in part.parameters())
    rows = trainer.gradient_accumulation_steps * config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    return (
        f"{config.model_spec.name} {config.model_spec.flavor}: {parameters / 1e6:.2f} M parameters"
        f"{'' if dims.pp == 1 else ' in this stage'}, on {utils.device_type}, {layout}, "
        f"{rows} x {config.training.seq_len} tokens a step, {config.training.steps} steps, "
        f"output in {config.dump_folder}"
    )


def guarded(request: RunRequest, world_size: int, claim: Callable[[], None] | None = None) -> int:
    """Train in this process; every failure is told in a paragraph instead of a traceback, unless ``--debug``.

    Args:
        request: The run.
        world_size: Processes of the run, of which this is one.
        claim: Called once everything has been checked, before anything is written.

    Returns:
        The exit code.
    """
    rank = int(os.environ.get("RANK", "0"))
    config = None
    try:
        config = prepare(request, world_size, announce=rank == 0)
        if tell_nothing_left(config, announce=rank == 0):
            return EXIT_DONE
        if claim is not None:
            claim()
        with locked(config.dump_folder) if rank == 0 else contextlib.nullcontext():
            _train(config, request)
        return EXIT_DONE
    except InputError as error:
        # The ranks of a machine find the same problems; one of each machine tells.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return EXIT_UNUSABLE_INPUT
        return report("npu-train" if rank == 0 else f"npu-train on {socket.gethostname()}", error)
    except RunFailed as error:
        if request.debug:
            raise
        # What all ranks found together, one of them tells.
        return report("npu-train", error) if getattr(error, "told_by_rank", rank) == rank else EXIT_PROBLEM
    except KeyboardInterrupt:
        print(f"npu-train: interrupted. {kept(config)}", file=sys.stderr)
        return 130
    except Exception as error:
        if request.debug:
            raise
        told = f"npu-train: rank {rank} failed: {type(error).__name__}: {error}"
        print(f"{told} (run again with --debug for the traceback)", file=sys.stderr, flush=True)
        return EXIT_PROBLEM


def main() -> int:
    """Entry point of a process that torchrun started: ``python -m npu_train.worker REQUEST``."""
    request = RunRequest.from_json(sys.argv[1])
    return guarded(request, int(os.environ["WORLD_SIZE"]))


if __name__ == "__main__":
    sys.exit(main())
