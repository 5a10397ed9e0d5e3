"""The metrics of a run: one line a step group on the console, the same numbers in ``metrics.jsonl``."""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor, _get_metrics_rank
from torchtitan.config import derive, override
from torchtitan.tools import utils

from ..console import duration, say
from ..events import EventLog


class StepLines(BaseLogger):
    """Prints and records what ``MetricsProcessor`` measured.

    Args:
        events: Where the numbers go.
        total_steps: The run's last step, for the remaining time.
        world_size: Processes of the run; torchtitan's throughput is a device's share.
        show_mfu: Whether the device's peak FLOP/s is known.
        echo: Whether to print.
    """

    def __init__(self, events: EventLog, total_steps: int, world_size: int, show_mfu: bool, echo: bool):
        self._events = events
        self._total_steps = total_steps
        self._world_size = world_size
        self._show_mfu = show_mfu
        self._echo = echo
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        now = time.perf_counter()
        if "validation_metrics/loss" in metrics:
            loss = metrics["validation_metrics/loss"]
            self._events.write(event="validation", step=step, loss=loss)
            if self._echo:
                say(f"step {step:>6}/{self._total_steps}  validation loss {loss:.4f}")
            return
        tokens_per_s = metrics["throughput(tps)"] * self._world_size
        mfu = metrics.get("mfu(%)") if self._show_mfu else None
        # The first step carries set-up costs, so remaining time is counted from its end.
        remaining = step_s = None
        if self._last is not None:
            step_s = (now - self._last[1]) / max(1, step - self._last[0])
            remaining = (now - self._first[1]) / max(1, step - self._first[0]) * (self._total_steps - step)
        if step >= self._total_steps:
            remaining = 0.0
        self._first = self._first or (step, now)
        self._last = (step, now)
        lr = next((value for key, value in metrics.items() if key.startswith("lr")), None)
        self._events.write(
            step=step,
            loss=metrics["loss_metrics/global_avg_loss"],
            grad_norm=metrics["grad_norm"],
            lr=lr,
            tokens_per_s=tokens_per_s,
            tokens=metrics.get("n_tokens_seen"),
            memory_gib=metrics["memory/max_reserved(GiB)"],
            step_s=step_s,
            mfu=mfu,
        )
        if self._echo:
            say(
                f"step {step:>6}/{self._total_steps}  loss {metrics['loss_metrics/global_avg_loss']:8.4f}  "
                f"grad_norm {metrics['grad_norm']:8.4f}  tokens/s {tokens_per_s:>8,.0f}  "
                f"memory {metrics['memory/max_reserved(GiB)']:.2f} GiB  "
                f"mfu {'n/a' if mfu is None else f'{mfu:.1f}%'}  "
                f"remaining {'?' if remaining is None else duration(remaining)}"
            )

    def close(self) -> None:
        self._events.close()


class RunMetrics(MetricsProcessor):
    """torchtitan's metrics, reported by ``StepLines`` and without an MFU where the peak FLOP/s is unknown."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        parallel_dims: Any,
        dump_folder: str = "./outputs",
        pp_schedule: str = "1F1B",
        config_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            config,
            parallel_dims=parallel_dims,
            dump_folder=dump_folder,
            pp_schedule=pp_schedule,
            config_dict=config_dict,
            **kwargs,
        )
        self._total_steps = config_dict["training"]["steps"]
        show_mfu = utils.device_type == "cuda"
        # Upstream prints "mfu: N/A" exactly when this is set and reads it nowhere else; without it, an unknown device
        # is measured against an A100.
        self.has_quantization = self.has_quantization or not show_mfu
        rank = torch.distributed.get_rank()
        self.is_reporter = rank == _get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)
        self.events = EventLog(dump_folder, enabled=self.is_reporter)
        if self.is_reporter:
            lines = StepLines(
                self.events,
                total_steps=self._total_steps,
                world_size=parallel_dims.world_size,
                show_mfu=show_mfu,
                # With --verbose torchtitan's own line is printed instead.
                echo=os.environ.get("NPU_TRAIN_VERBOSE") != "1",
            )
            container = LoggerContainer()
            container.add_logger(self.logger)
            container.add_logger(lines)
            self.logger = container

    def should_log(self, step: int) -> bool:
        # The last step is what people look at.
        return step == self._total_steps or super().should_log(step)


@override(target=MetricsProcessor.Config, exact=True, description="one line a step group, and metrics.jsonl")
def run_metrics(config: MetricsProcessor.Config) -> RunMetrics.Config:
    return derive(config, RunMetrics.Config)
