"""torchtitan's checkpoint manager, which says what it loaded and saved."""

import time
from dataclasses import dataclass

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import derive, override

from ..checkpoints import find_checkpoints
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
        saved = super()._save(curr_step, last_step)
        if saved and self._is_reporter:
            path = self._create_checkpoint_id(curr_step)
            if self.save_future is None:
                say(f"saved checkpoint {path} ({time.perf_counter() - begin:.1f}s)")
            else:
                say(f"saving checkpoint {path} in the background")
            self._events.write(event="checkpoint", step=curr_step, path=path)
        return saved

    def _close(self) -> None:
        super()._close()
        self._events.close()


@override(target=CheckpointManager.Config, exact=True, description="says what it loaded and saved")
def reporting_checkpoint(config: CheckpointManager.Config) -> ReportingCheckpointManager.Config:
    return derive(config, ReportingCheckpointManager.Config)
