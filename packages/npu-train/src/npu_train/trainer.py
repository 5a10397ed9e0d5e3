"""torchtitan's trainer, stopped before a non-finite gradient reaches the weights; validation after the last step."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.validate import Validator
from torchtitan.tools import utils
from torchtitan.tools.logging import logger, warn_once
from torchtitan.trainer import Trainer

from npu_debug.nonfinite import Finding, find_nonfinite

from . import checkpoints
from .errors import RunFailed
from .events import EventLog

# Kinds of a finding, causes before their consequences. A decoder is fed token ids, so a bad input of a model part is
# what another pipeline stage sent.
_CAUSES = ("parameter", "buffer", "output", "loss", "input", "gradient")


class NonFiniteError(RunFailed):
    """The loss, a gradient or a parameter is NaN or infinite."""

    def __init__(self, message: str, *, told_by_rank: int):
        super().__init__(message)
        self.told_by_rank = told_by_rank


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor of this rank that holds NaN or infinity, or None.

    Args:
        tensors: Names and floating-point tensors of any shape, DTensors among them.
    """
    return next((name for name, tensor in tensors if not bool(_local(tensor).isfinite().all())), None)


def _of_all_ranks(name: str | None) -> tuple[int, str] | None:
    """The first rank that has found something, and what; None where none has."""
    names: list[str | None] = [name]
    if torch.distributed.get_world_size() > 1:
        names = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(names, name)
    return next(((rank, found) for rank, found in enumerate(names) if found is not None), None)


class LastStepValidator(Validator):
    """``Validator`` that also validates after the run's last step, whatever ``--validator.freq`` says.

    Attributes:
        last_step: The number of that step, which ``NpuTrainer`` sets; 0 where another trainer does not.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    last_step = 0

    def should_validate(self, step: int) -> bool:
        return step == self.last_step or super().should_validate(step)


class NpuTrainer(Trainer):
    """``Trainer`` that checks each step's gradients between clipping and the optimizer, and what is to be saved.

    On the CPU every step is checked. On an accelerator the check would wait for the device, so only the steps that wait
    anyway are checked: those that are logged or saved. Parameters are checked before each checkpoint and at the end.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config):
        self._microbatches: list[dict[str, Any]] = []
        super().__init__(config)
        self._named_parameters = [item for part in self.model_parts for item in part.named_parameters()]
        self.optimizers.register_step_pre_hook(self._stop_before_nonfinite_step)
        self.optimizers.register_step_post_hook(self._stop_before_nonfinite_checkpoint)
        if config.validator.enable and isinstance(self.validator, LastStepValidator):
            self.validator.last_step = config.training.steps

    def train_step(self, data_iterator: Any) -> None:
        self._microbatches.clear()
        super().train_step(data_iterator)

    def forward_backward_step(self, **microbatch: Any) -> torch.Tensor:
        # Kept (token ids only) so that the step can be replayed to find where it went wrong.
        self._microbatches.append(microbatch)
        return super().forward_backward_step(**microbatch)

    def _checks_this_step(self) -> bool:
        # Nothing that was not checked becomes a checkpoint.
        return utils.device_type == "cpu" or self.metrics_processor.should_log(self.step) or self._saves_this_step()

    def _saves_this_step(self) -> bool:
        should_save = getattr(self.checkpointer, "_should_save", lambda *_: True)
        return self.config.checkpoint.enable and should_save(self.step, self.step == self.config.training.steps)

    def _first_nonfinite_parameter(self) -> tuple[int, str] | None:
        return _of_all_ranks(first_nonfinite((name, p.detach()) for name, p in self._named_parameters))

    def _stop_before_nonfinite_checkpoint(self, *_: Any) -> None:
        if not (self._saves_this_step() or self.step == self.config.training.steps):
            return
        found = self._first_nonfinite_parameter()
        if found is not None:
            rank, name = found
            raise self._error(
                f"the parameter {name} is not finite after this step. Nothing was saved.",
                f"the parameter {name} on rank {rank}",
                told_by_rank=rank,
            )

    def _stop_before_nonfinite_step(self, *_: Any) -> None:
        """Compare what clipping left of one small gradient on every rank.

        Clipping multiplies every gradient by max_norm / norm. A NaN norm makes all of them NaN on every rank; an
        infinite one makes the finite ones zero and the infinite ones NaN. So where any rank has a finite gradient that
        is not zero, all is well.
        """
        if not self._checks_this_step():
            return
        gradients = [(name, _local(p.grad)) for name, p in self._named_parameters if p.grad is not None]
        probe = next((gradient for _, gradient in gradients if gradient.numel()), None)
        if probe is None:
            fine, bad = False, False
        else:
            bad = not bool(probe.isfinite().all())
            fine = not bad and bool(probe.any())
        world_size = torch.distributed.get_world_size()
        if world_size > 1:
            flags = torch.tensor([fine, probe is not None and not bad], dtype=torch.int32, device=self.device)
            torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
            fine, some_zero = (bool(flag) for flag in flags.tolist())
        else:
            some_zero = probe is None or not bad
        if fine:
            return
        if not some_zero:
            raise self._step_error(self._find_first(), told_by_rank=0)
        infinite = _of_all_ranks(first_nonfinite(gradients))
        if infinite is not None:
            rank, name = infinite
            raise self._step_error(f"On rank {rank}, the gradient of {name} is infinite.", told_by_rank=rank)
        warn_once(logger, "every gradient of a step was zero after clipping: nothing was learned from it")

    def _find_first(self) -> str:
        """Replay the step on all ranks and name the first non-finite tensor."""
        microbatches = list(self._microbatches)

        def replay() -> None:
            for microbatch in microbatches:
                Trainer.forward_backward_step(self, **microbatch)

        found = find_nonfinite(self.model_parts, replay)
        findings: list[Finding | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(findings, found)
        # The cause on one rank shows as a consequence on the others, so the earliest kind of all ranks is the first.
        candidates = [(_CAUSES.index(f.kind), rank, f) for rank, f in enumerate(findings) if f is not None]
        if not candidates:
            return "A replay of the step was finite, so the fault is not deterministic."
        _, rank, first = min(candidates, key=lambda candidate: candidate[:2])
        return f"On rank {rank}: {first}" if len(findings) > 1 else str(first)

    def _step_error(self, finding: str, *, told_by_rank: int) -> NonFiniteError:
        what = f"the loss or a gradient is not finite. {finding} The step was not applied."
        return self._error(what, finding, told_by_rank=told_by_rank)

    def _error(self, what: str, finding: str, *, told_by_rank: int) -> NonFiniteError:
        folder = Path(self.config.dump_folder) / self.config.checkpoint.folder
        last = checkpoints.latest(folder) if self.config.checkpoint.enable else None
        broken = self._first_nonfinite_parameter()
        if last is None:
            keep = "There is no checkpoint of this run yet."
        elif broken is not None and last.step == self.step - 1:
            keep = f"The weights were not finite before it: do not go on from {last.path}, but from an earlier one."
        else:
            keep = f"The last good checkpoint is {last.path}; its weights are untouched."
        events = EventLog(self.config.dump_folder, enabled=torch.distributed.get_rank() == told_by_rank)
        events.write(event="nonfinite", step=self.step, finding=finding)
        events.close()
        return NonFiniteError(
            f"stopped at step {self.step}: {what} {keep} Lower --optimizer.param-groups.0.optimizer-kwargs.lr or raise "
            f"--lr-scheduler.warmup-steps, then start {'again' if last is None else 'from that checkpoint'}.",
            told_by_rank=told_by_rank,
        )
