"""torchtitan's checkpoint manager, which says what it loaded and saved, or why it could not."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import derive, override

from ..checkpoints import INDEX_FILES, find_checkpoints, latest
from ..console import say
from ..errors import RunFailed, reason
from ..events import EventLog


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written or read."""

    def __init__(self, message: str, *, told_by_rank: int):
        super().__init__(message)
        self.told_by_rank = told_by_rank


@contextlib.contextmanager
def _failure_in_a_sentence(tell: Callable[[str], str]) -> Iterator[None]:
    """Replace torch's exception, which is no ``Exception`` and prints as the tracebacks of all ranks.

    Args:
        tell: Makes the sentence of the reason.
    """
    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
        # Ctrl-C while torch writes; the ranks that waited for this one failed of it.
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes.values()):
            raise KeyboardInterrupt from None
        rank, cause = next(iter(causes.items()))
        raise CheckpointFailed(tell(reason(cause)), told_by_rank=rank) from error


class ReportingCheckpointManager(CheckpointManager):
    """``CheckpointManager`` with one line a load and a save, and their events in ``metrics.jsonl``."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, *, base_folder: str = "", **kwargs):
        super().__init__(config, base_folder=base_folder, **kwargs)
        self._is_reporter = torch.distributed.get_rank() == 0
        self._events = EventLog(base_folder, enabled=self._is_reporter and config.enable)
        # An asynchronous save that has not been waited for: step and folder.
        self._pending: tuple[int, Path] | None = None

    def _load(self, step: int = -1) -> bool:
        if self._is_reporter and step == -1:
            for checkpoint in find_checkpoints(self.folder):
                if not checkpoint.complete:
                    say(f"ignoring {checkpoint.path}: {checkpoint.problem}")
        with _failure_in_a_sentence(functools.partial(self._cannot_load, step)):
            loaded = super()._load(step)
        if loaded:
            restored = self.states["train_state"].step
            if self._is_reporter:
                say(f"resuming after step {restored}" if restored else "starting from the given weights")
            self._events.write(event="resume", step=restored)
        return loaded

    def _cannot_load(self, step: int, why: str) -> str:
        step = self._find_load_step() if step == -1 else step
        if step == -1:
            what = self.initial_load_path or "of the folder of the model's assets"
            advice = "Choose another with --checkpoint.initial-load-path"
        else:
            what = self._create_checkpoint_id(step)
            earlier = [c.step for c in find_checkpoints(self.folder) if c.complete and c.step < step]
            advice = f"If it is damaged, delete it or move it out of {self.folder}: "
            advice += f"the run then goes on from step {earlier[-1]}" if earlier else "no earlier one is there"
        return f"the checkpoint {what} does not load: it is damaged, or of another configuration ({why}). {advice}."

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        begin = time.perf_counter()
        path = Path(self._create_checkpoint_id(curr_step))
        if self._is_reporter and self._should_save(curr_step, last_step):
            # Over an older checkpoint of this step: while its files are replaced it must not look whole. The others
            # write only after all ranks, this one included, have agreed on the plan.
            for name in INDEX_FILES:
                (path / name).unlink(missing_ok=True)
        with _failure_in_a_sentence(functools.partial(self._cannot_save, path)):
            saved = super()._save(curr_step, last_step)
        if saved and self.save_future is not None:
            self._pending = (curr_step, path)
        if saved and self._is_reporter:
            if self.save_future is None:
                say(f"saved checkpoint {path} ({time.perf_counter() - begin:.1f}s)")
                self._events.write(event="checkpoint", step=curr_step, path=str(path))
            else:
                say(f"saving checkpoint {path} in the background")
        return saved

    def _cannot_save(self, path: Path, why: str) -> str:
        last = latest(self.folder)
        keep = f"The last good checkpoint is {last.path}." if last else "There is no whole checkpoint of this run yet."
        return (
            f"the checkpoint {path} could not be written ({why}). Look for a full disk, a quota or a limit on file "
            f"sizes (ulimit -f). {keep}"
        )

    def _wait_for_saving(self) -> None:
        path = self._pending[1] if self._pending else Path(self.folder)
        with _failure_in_a_sentence(functools.partial(self._cannot_save, path)):
            try:
                super()._wait_for_saving()
            finally:
                # Closing would wait for it again.
                self.save_future = None
        self._report_pending()

    def _report_pending(self) -> None:
        if self._pending is not None:
            step, path = self._pending
            self._events.write(event="checkpoint", step=step, path=str(path))
            self._pending = None

    def _close(self) -> None:
        self.maybe_wait_for_saving()
        super()._close()
        self._events.close()


@override(target=CheckpointManager.Config, exact=True, description="says what it loaded and saved")
def reporting_checkpoint(config: CheckpointManager.Config) -> ReportingCheckpointManager.Config:
    return derive(config, ReportingCheckpointManager.Config)
