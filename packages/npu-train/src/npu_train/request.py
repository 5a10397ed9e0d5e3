"""What a user asked ``npu-train run`` for, as plain data: passed to the worker processes and kept in ``run.json``."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RunRequest:
    """One run.

    Attributes:
        module: torchtitan's ``--module``.
        config: torchtitan's ``--config``.
        options: torchtitan's options, as given.
        recipe: The recipe's name, or "" where module and config were given.
        device: ``--device``.
        data: ``--data``, or "".
        text_field: ``--text-field``, or "".
        dump_folder: The run's folder, or "" for the configuration's own.
        resume: Whether ``--resume`` asks for an existing checkpoint.
        verbose: Whether to print torchtitan's whole log.
        debug: Whether to show tracebacks.
    """

    module: str
    config: str
    options: tuple[str, ...] = ()
    recipe: str = ""
    device: str = "auto"
    data: str = ""
    text_field: str = ""
    dump_folder: str = ""
    resume: bool = False
    verbose: bool = False
    debug: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RunRequest":
        fields = json.loads(text)
        return cls(**{**fields, "options": tuple(fields["options"])})
