"""torchtitan's checkpoint manager, which says what it loaded and saved."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import derive, override

from ..checkpoints import INDEX_FILES, find_checkpoints
from ..console import say
from ..events import EventLog


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
        loaded = super()._load(step)
        if loaded:
            restored = self.states["train_state"].step
            if self._is_reporter:
                say(f"resuming after step {restored}" if restored else "starting from the given weights")
            self._events.write(event="resume", step=restored)
        return loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        begin = time.perf_counter()
        path = Path(self._create_checkpoint_id(curr_step))
        if self._is_reporter and self._should_save(curr_step, last_step):
            # Over an older checkpoint of this step: while its files are replaced it must not look whole. The others
            # write only after all ranks, this one included, have agreed on the plan.
            for name in INDEX_FILES:
                (path / name).unlink(missing_ok=True)
        saved = super()._save(curr_step, last_step)
        if saved and self._is_reporter:
            if self.save_future is None:
                say(f"saved checkpoint {path} ({time.perf_counter() - begin:.1f}s)")
                self._events.write(event="checkpoint", step=curr_step, path=str(path))
            else:
                say(f"saving checkpoint {path} in the background")
                self._pending = (curr_step, path)
        return saved

    def _wait_for_saving(self) -> None:
        super()._wait_for_saving()
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
