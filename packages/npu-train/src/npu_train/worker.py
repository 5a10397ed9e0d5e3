"""One training process: device, configuration, checks, torchtitan's trainer."""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import EXIT_DONE, EXIT_PROBLEM, EXIT_UNUSABLE_INPUT, InputError, RunFailed, report
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


def prepare(request: RunRequest, world_size: int | None, *, announce: bool) -> "Trainer.Config":
    """``configure`` and check everything.

    Raises:
        InputError: with every problem found.
    """
    from .console import say

    config, device = configure(request)
    from .check import check

    problems = check(config, device.type, world_size, resume=request.resume)
    if problems:
        raise InputError(*problems)
    if announce:
        for note in device.notes:
            say(f"note: {note}")
    return config


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


def train(request: RunRequest, world_size: int, claim: Callable[[], None] | None = None) -> int:
    """Train in this process, which is one of ``world_size``; return the exit code.

    Args:
        request: The run.
        world_size: Processes of the run.
        claim: Called once everything has been checked, before anything is written.
    """
    rank = int(os.environ["RANK"])
    announce = rank == 0
    config = prepare(request, world_size, announce=announce)
    if claim is not None:
        claim()

    import torch
    from torchtitan.observability import structured_logger as sl

    from .console import say

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
    return EXIT_DONE


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
    """``train`` with every failure told in a paragraph instead of a traceback, unless ``--debug``."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        return train(request, world_size, claim)
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
        print("npu-train: interrupted. Finished checkpoints are kept; continue with --resume.", file=sys.stderr)
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
