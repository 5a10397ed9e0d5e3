"""``metrics.jsonl``: what a run leaves behind for people and for ``npu-debug logs``, one JSON object a line."""

import json
import time
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


class EventLog:
    """Appends lines to ``metrics.jsonl`` of a run folder; a line is written whole or not at all.

    Args:
        folder: The run's output folder (torchtitan's ``dump_folder``).
        enabled: Whether this process is the one that writes; the others drop what they are given.
    """

    def __init__(self, folder: str | Path, enabled: bool = True):
        self._file = None
        if enabled:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # Line buffered: a run that is killed has written every finished line.
            self._file = (Path(folder) / FILE_NAME).open("a", encoding="utf-8", buffering=1)

    def write(self, **fields: Any) -> None:
        """Append one line; ``time`` (seconds since the epoch) is added."""
        if self._file is not None:
            self._file.write(json.dumps({"time": round(time.time(), 3), **fields}, ensure_ascii=False) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
