"""Read the metrics of a training run and say how it went. Standard library only."""

from __future__ import annotations

import gc
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import BinaryIO

from npu_debug.errors import InputError

Number = int | float

METRICS_FILE = "metrics.jsonl"
# A JSON object with a step but none of these (a span of a structured log, say) is not a metric line.
METRICS = {"loss", "grad_norm", "lr", "tokens_per_s", "tokens", "memory_gib", "step_s", "mfu"}

BLOCK_BYTES = 1 << 20

_HUGE = 1 << 1000
_MAX_STEP = 1 << 63
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"\s*(?:(\d{1,9}): ?)?(?:\[[A-Za-z_]+(\d{1,9})\]: ?)?")
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d),(\d{3})")
# At most 18 digits, which is below _MAX_STEP.
_TRAIN = re.compile(r"(validate )?step: *(\d{1,18})\s+loss: *(\S+)(.*)")
_FIELD = re.compile(r"(grad_norm|memory|tps|wps|tflops|mfu): *(-?(?:[\d.,]+|nan|inf))")
_STARTS = re.compile(r"Training starts at step (\d{1,18})\b")
_NOT_FINITE = re.compile(r"Loss is not finite.* at step (\d{1,18})\b")
_GARBLED = re.compile(r" - (validate )?step:")
_COLUMN = {"memory": "memory_gib", "tps": "tokens_per_s", "wps": "tokens_per_s"}
# What has to be finite, and what a person calls it.
_JUDGED = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}


@dataclass
class Run:
    """The metrics of one training run.

    Attributes:
        name: The path as it was given; "-" for standard input.
        format: "metrics.jsonl" or "console".
        steps: One list per column, all of the same length and ordered by `step`. A value that was not logged is None,
            which is not the same as a logged NaN. `attempt` counts from 1 and tells which start of the run logged the
            row. Units: `time` s since 1970, `loss` nats per token, `tokens_per_s` tokens/s (per device in a console
            log), `memory_gib` GiB, `step_s` s. A console log states no time zone: only differences of its times mean
            something.
        events: The event records in file order, each with the key `attempt` added.
        restarts: For every attempt after the first, the step that it logged first, or None if it logged none.
        first_time: Earliest time in the file, s.
        last_time: Latest time in the file, s.
        lines: Number of lines in the file.
        unreadable: Number of lines that are cut or garbled.
        notes: What a reader has to know about how the file was read, one sentence each.
    """

    name: str
    format: str
    steps: dict[str, list[Number | None]]
    events: list[dict[str, object]]
    restarts: list[int | None]
    first_time: float | None
    last_time: float | None
    lines: int
    unreadable: int
    notes: list[str] = field(default_factory=list)


@dataclass
class Summary:
    """What `summarise` found. None where the run does not tell.

    Attributes:
        status: "finished" (an end was logged), "non-finite" or "unfinished" (still running, or killed).
        first_step: First logged step.
        last_step: Last step of the last attempt that logged any.
        logged_steps: Number of different steps logged.
        first_loss: Loss at `first_step`, nats per token.
        last_loss: Loss at `last_step`, nats per token.
        best_loss: Lowest finite loss, nats per token.
        best_step: Step of `best_loss`.
        drop_nats: `first_loss - last_loss`; None unless both are finite.
        grad_norm_max: Largest finite gradient norm.
        grad_norm_max_step: Step of `grad_norm_max`.
        tokens_per_s_median: Median without the first row of each attempt, tokens/s.
        step_s_median: Median step time without the first row of each attempt, s.
        step_s_p95: 95th percentile of the same step times (linear interpolation), s.
        slow_steps: Steps whose time exceeds `slow_factor` times the median.
        memory_gib_max: Largest memory logged, GiB.
        tokens: Tokens seen up to `last_step`.
        validation_loss: Loss of the last validation, nats per token.
        validation_step: Step of the last validation.
        wall_s: Time from the first to the last record, pauses between attempts included, s.
        restarts: See `Run.restarts`.
        nonfinite: Steps with a NaN or infinity that no later attempt put right, by where it was: "loss",
            "gradient norm", "learning rate", "validation loss", or "loss or gradient norm" where only the stop of the
            run was logged.
        nonfinite_steps: All steps of `nonfinite`.
        problem: Whether a person has to look at this run.
    """

    status: str
    first_step: int | None = None
    last_step: int | None = None
    logged_steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    drop_nats: float | None = None
    grad_norm_max: float | None = None
    grad_norm_max_step: int | None = None
    tokens_per_s_median: float | None = None
    step_s_median: float | None = None
    step_s_p95: float | None = None
    slow_steps: list[int] = field(default_factory=list)
    memory_gib_max: float | None = None
    tokens: int | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    wall_s: float | None = None
    restarts: list[int | None] = field(default_factory=list)
    nonfinite: dict[str, list[int]] = field(default_factory=dict)
    nonfinite_steps: list[int] = field(default_factory=list)
    problem: bool = False

    def as_json(self) -> dict[str, object]:
        """Returns the fields as a dictionary that is valid JSON: a NaN or infinite value becomes None."""
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in asdict(self).items()}


def read_run(path: str | Path, progress: Callable[[int], None] | None = None) -> Run:
    """Read the metrics of one run.

    Lines that are cut or garbled are counted in `Run.unreadable` and mentioned in `Run.notes`. When a step occurs more
    than once, as after a restart, its last line counts.

    Args:
        path: A folder with a `metrics.jsonl`, such a file under any name, or a torchtitan console log (colours,
            launcher prefixes and the lines of several ranks are understood); "-" reads standard input. The format is
            recognised by content.
        progress: Called now and then with the number of lines read so far.

    Returns:
        The run.

    Raises:
        InputError: The path is empty, missing, unreadable, empty, or holds neither format.
    """
    name = str(path)
    if not name:
        raise InputError(
            f"The name of a run is empty. Give the output folder of a training run, its {METRICS_FILE}, or its console "
            "log; an unset shell variable may be the reason."
        )
    if name == "-":
        return _read(name, sys.stdin.buffer, progress)
    file = Path(path)
    try:
        if file.is_dir():
            file = file / METRICS_FILE
            if not file.exists():
                raise InputError(
                    f"The folder {name} has no {METRICS_FILE}. Give the output folder of a training run, or name the "
                    f"file with its console output.{_log_files(Path(path))}"
                )
        with file.open("rb") as stream:
            return _read(name, stream, progress)
    except FileNotFoundError:
        raise InputError(
            f"There is no file or folder {name}. Give the output folder of a training run, its {METRICS_FILE}, or its "
            "console log."
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def summarise(run: Run, slow_factor: float = 2.0) -> Summary:
    """Describe how a run went.

    Args:
        run: A run from `read_run`.
        slow_factor: A step is slow when it takes longer than this many median step times.

    Returns:
        The summary.
    """
    columns = run.steps
    steps, attempts = columns["step"], columns["attempt"]
    attempt = len(run.restarts) + 1
    found = Summary(status="unfinished", restarts=run.restarts, logged_steps=len(steps))
    if run.first_time is not None and run.last_time is not None:
        found.wall_s = run.last_time - run.first_time

    bad = {
        what: {step for step, v in zip(steps, columns.get(key, ()), strict=False) if v is not None and not isfinite(v)}
        for key, what in _JUDGED.items()
    }
    by_column = set().union(*bad.values())
    bad["loss or gradient norm"] = set()
    logged_by = dict(zip(steps, attempts, strict=True))
    last_kinds = set()
    validations: dict[int, Number | None] = {}
    for event in run.events:
        kind, step = event.get("event"), event.get("step")
        if event["attempt"] == attempt:
            last_kinds.add(kind)
        # A step that a later attempt logged again was put right, or is judged by what that attempt logged.
        if type(step) is not int or logged_by.get(step, 0) > event["attempt"]:
            continue
        if kind == "nonfinite" and step not in by_column:
            bad["loss or gradient norm"].add(step)
        if kind == "validation":
            validations.pop(step, None)
            validations[step] = _number(event.get("loss"))
    if validations:
        found.validation_step, found.validation_loss = list(validations.items())[-1]
    bad["validation loss"] = {step for step, loss in validations.items() if loss is not None and not isfinite(loss)}
    found.nonfinite = {what: sorted(found_at) for what, found_at in bad.items() if found_at}
    found.nonfinite_steps = sorted(set().union(*bad.values()))
    if "nonfinite" in last_kinds:
        found.status = "non-finite"
    elif "end" in last_kinds:
        found.status = "finished"
    found.problem = bool(found.nonfinite) or found.status == "non-finite"
    if not steps:
        return found

    last = _last_row(columns)
    found.first_step, found.last_step = steps[0], steps[last]
    loss = columns.get("loss", [None] * len(steps))
    found.first_loss, found.last_loss = loss[0], loss[last]
    if _finite(found.first_loss) and _finite(found.last_loss):
        found.drop_nats = found.first_loss - found.last_loss
    if "tokens" in columns:
        found.tokens = columns["tokens"][last]
    if best := _extreme(min, loss, steps):
        found.best_loss, found.best_step = best
    if largest := _extreme(max, columns.get("grad_norm", []), steps):
        found.grad_norm_max, found.grad_norm_max_step = largest
    if largest := _extreme(max, columns.get("memory_gib", []), steps):
        found.memory_gib_max = largest[0]

    # The first step of an attempt compiles and warms up; it says nothing about the speed of the run.
    steady = [i for i in range(len(steps)) if i and attempts[i] == attempts[i - 1]] or list(range(len(steps)))
    if "tokens_per_s" in columns:
        found.tokens_per_s_median = percentile([columns["tokens_per_s"][i] for i in steady], 50)
    if "step_s" in columns:
        step_s = columns["step_s"]
        steady_s = sorted([step_s[i] for i in steady if _finite(step_s[i])])
        found.step_s_median = percentile(steady_s, 50)
        found.step_s_p95 = percentile(steady_s, 95)
        if found.step_s_median is not None:
            limit = slow_factor * found.step_s_median
            found.slow_steps = [steps[i] for i in steady if step_s[i] is not None and step_s[i] > limit]
    return found


def percentile(values: Iterable[Number | None], percent: float) -> float | None:
    """Percentile with linear interpolation between the two nearest ranks; values that are not finite are left out.

    Args:
        values: Any numbers; None is left out.
        percent: From 0 to 100.

    Returns:
        The percentile, or None when no finite value remains.
    """
    ranked = sorted([v for v in values if v is not None and isfinite(v)])
    if not ranked:
        return None
    place = (len(ranked) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    # Not low + (high - low) * part: that difference of two floats can be infinite.
    return ranked[low] * (1 - (place - low)) + ranked[high] * (place - low)


def _finite(value: object) -> bool:
    return value is not None and isfinite(value)


def _extreme(pick: Callable, values: list[Number | None], steps: list[int]) -> tuple[Number, int] | None:
    finite = [v for v in values if v is not None and isfinite(v)]
    return (value := pick(finite), steps[values.index(value)]) if finite else None


def _numbers(values: list[object]) -> list[Number | None]:
    kinds = set(map(type, values))
    if kinds <= {float, NoneType} or (kinds == {int} and min(values) > -_HUGE and max(values) < _HUGE):
        return values
    return [_number(v) for v in values]


def _number(value: object) -> Number | None:
    """The value as a number that fits a float; None for anything else, including bool."""
    kind = type(value)
    if kind is int:
        return value if -_HUGE < value < _HUGE else math.copysign(math.inf, value)
    if kind is str:
        try:
            return float(value)
        except ValueError:
            return None
    return value if kind is float else None


def _blocks(stream: BinaryIO) -> Iterator[tuple[list[str], bool]]:
    """Blocks of lines without their ends, each with whether its last line has an end in the file."""
    rest = stream.read(3).removeprefix(b"\xef\xbb\xbf")  # the byte order mark of an editor
    while block := stream.read(BLOCK_BYTES):
        whole, end, rest = (rest + block).rpartition(b"\n")
        if end:
            yield whole.decode("utf-8", "replace").split("\n"), True
        # A file without line ends, such as a checkpoint given by mistake, must not be loaded as one line.
        if len(rest) > BLOCK_BYTES:
            yield [rest.decode("utf-8", "replace")], False
            rest = b""
    if rest:
        yield [rest.decode("utf-8", "replace")], False


def _read(name: str, stream: BinaryIO, progress: Callable[[int], None] | None) -> Run:
    # A hundred thousand new dictionaries without a cycle among them: the collector would take a fifth of the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(name, stream, progress)
    finally:
        if enabled:
            gc.enable()


def _parse(name: str, stream: BinaryIO, progress: Callable[[int], None] | None) -> Run:
    by_rank: dict[int, list[dict]] = defaultdict(list)
    unreadable: list[int] = []
    form, lines, opening, cut = "", 0, "", False
    for block, whole in _blocks(stream):
        if progress:
            progress(lines)
        cut = not whole
        form = form or _recognise(block)
        opening = opening or next((line.strip() for line in block if line.strip()), "")
        if not form:
            lines += len(block)
            continue
        records = _parse_console(block, cut) if form == "console" else _parse_json(block)
        unreadable += [number for number, record in enumerate(records, lines + 1) if record is False]
        if form == "console":
            for record in filter(None, records):
                by_rank[record.pop("rank")].append(record)
        else:
            by_rank[0] += filter(None, records)
        lines += len(block)
    if not opening:
        raise InputError(
            f"{name} is empty: no step was logged. Wait until the run has logged its first step, or look in its "
            "console output for the error that stopped it."
        )
    if not form:
        # Quoted in ASCII because a binary file may hold bytes that change the terminal.
        raise InputError(
            f"{name} was not recognised: none of its {lines} lines is a metric line of npu-train ({METRICS_FILE}) or a "
            f"step line of torchtitan ('step: 1  loss: ...'). Its first line starts with {opening[:60]!a}. Give "
            f"the output folder of the run, its {METRICS_FILE}, or its console log."
        )

    records, notes = _choose_rank(by_rank)
    run = _assemble(records, repeats=form == "console")
    if unreadable:
        what = "1 line was" if len(unreadable) == 1 else f"{len(unreadable)} lines were"
        where = f"line {unreadable[0]}" if len(unreadable) == 1 else f"first line {unreadable[0]}"
        killed = "; the last line has no end: the run was killed or is still writing"
        end = killed if cut and unreadable[-1] == lines else ""
        notes.append(f"{what} cut or garbled and left out ({where}{end}).")
    if form == "console":
        notes.append("Console log: tokens/s is per device, and a step time is the mean since the line before it.")
        _add_step_times(run.steps)
    run.name, run.format, run.lines, run.unreadable = name, form, lines, len(unreadable)
    run.notes = notes + run.notes
    return run


def _recognise(block: list[str]) -> str:
    for line in block:
        if line.lstrip().startswith("{"):
            if _parse_json([line])[0]:
                return "metrics.jsonl"
        elif _console_record(line):
            return "console"
    return ""


def _parse_json(block: list[str]) -> list[dict | bool | None]:
    """One entry a line: the record; None for an empty line; False for one that is cut, garbled or something else."""
    try:
        # One call for all lines takes half the time of one call a line.
        values = json.loads(f"[{','.join(block)}]")
        if len(values) != len(block):
            values = [_json_value(line) for line in block]
    except (ValueError, RecursionError):
        values = [_json_value(line) for line in block]
    return [
        value
        if type(value) is dict
        and (
            isinstance(event, str) and (event != "validation" or type(value.get("step")) is int)
            if (event := value.get("event")) is not None
            else type(step := value.get("step")) is int and 0 <= step < _MAX_STEP and not METRICS.isdisjoint(value)
        )
        else (None if value is None else False)
        for value in values
    ]


def _json_value(line: str) -> object:
    if not line.strip():
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return False


def _parse_console(block: list[str], cut: bool) -> list[dict | bool | None]:
    """One entry a line: the record with its rank; False for a step line that is garbled; None for any other line."""
    records = [_console_record(line) for line in block]
    # A number that is cut short is still a number: trust a last line without an end only if it has its last field.
    if cut and records[-1] and not _ANSI.sub("", block[-1]).endswith(("%", "N/A")):
        records[-1] = False
    return records


def _console_record(text: str) -> dict | bool | None:
    if "step" not in text and "Training completed" not in text:
        return None
    text = _ANSI.sub("", text)
    slurm, rank = _PREFIX.match(text).groups()
    record: dict = {"rank": int(rank or slurm or 0)}
    if stamp := _TIME.search(text):
        *clock, millisecond = map(int, stamp.groups())
        try:
            record["time"] = datetime(*clock, tzinfo=UTC).timestamp() + millisecond / 1000
        except ValueError:
            return False
    if match := _TRAIN.search(text):
        validate, step, loss, rest = match.groups()
        try:
            record |= {"step": int(step), "loss": float(loss)}
            for key, value in _FIELD.findall(rest):
                record[_COLUMN.get(key, key)] = float(value.replace(",", ""))
        except ValueError:
            return False
        return record | {"event": "validation"} if validate else record
    if match := _STARTS.search(text):
        return record | {"event": "start", "step": int(match[1]) - 1}
    if match := _NOT_FINITE.search(text):
        return record | {"event": "nonfinite", "step": int(match[1])}
    if text.rstrip().endswith("Training completed"):
        return record | {"event": "end"}
    return False if _GARBLED.search(text) else None


def _choose_rank(by_rank: dict[int, list[dict]]) -> tuple[list[dict], list[str]]:
    """The records of the rank that knows the loss, and a note if there were others.

    Every rank prints its own step lines. With pipeline parallelism only the ranks of one stage know the loss; the
    others print a negative placeholder.
    """

    def knows_loss(rank: int) -> tuple[bool, bool]:
        losses = [r["loss"] for r in by_rank[rank] if "loss" in r and "event" not in r]
        return not losses, all(loss < 0 for loss in losses)

    chosen = min(by_rank, key=lambda rank: (*knows_loss(rank), rank))
    records = list(by_rank[chosen])
    if len(by_rank) == 1:
        return records, []
    # The failing rank alone may have printed the error.
    seen = {r.get("step") for r in records if r.get("event") == "nonfinite"}
    for rank in sorted(by_rank):
        for record in by_rank[rank]:
            if record.get("event") == "nonfinite" and record["step"] not in seen:
                seen.add(record["step"])
                records.append(record)
    return records, [f"The file holds lines of {len(by_rank)} ranks; these are the numbers of rank {chosen}."]


def _assemble(records: list[dict], repeats: bool) -> Run:
    """Columns, events and attempts from the records in file order.

    A step number that falls back is a restart; one that stays is a restart too unless `repeats` says that a line may
    have been printed twice.
    """
    rows: dict[int, dict] = {}
    attempt_of: dict[int, int] = {}
    events: list[dict[str, object]] = []
    begins: list[int | None] = [None]  # the first logged step of every attempt
    announced: set[str | None] = set()  # kinds of events of this attempt
    previous = -1
    for record in records:
        step, kind = record.get("step"), record.get("event")
        if kind is None and (step > previous or (repeats and step == previous)):
            if begins[-1] is None:
                begins[-1] = step
        else:
            # A start writes "start", "resume" or both before its first row.
            begin = kind in ("start", "resume") and (begins[-1] is not None or kind in announced)
            if kind is None or begin:
                begins.append(step if kind is None else None)
                previous, announced = -1, set()
            announced.add(kind)
            if kind is not None:
                events.append(record | {"attempt": len(begins)})
                continue
        previous = step
        rows[step] = record
        attempt_of[step] = len(begins)

    steps = sorted(rows)
    ordered = [rows[step] for step in steps]
    columns: dict[str, list[Number | None]] = {"step": steps, "attempt": [attempt_of[step] for step in steps]}
    for key in dict.fromkeys(chain.from_iterable(ordered)):
        if key not in columns:
            column = _numbers([row.get(key) for row in ordered])
            if any(v is not None for v in column):
                columns[key] = column
    notes = []
    reached = _last_row(columns)
    if reached + 1 < len(steps):
        notes.append(
            f"Steps {steps[reached + 1]} to {steps[-1]} were logged before the last restart; the run has not come back "
            "to them."
        )
    times = [t for t in _numbers([record.get("time") for record in records]) if _finite(t)]
    span = (min(times), max(times)) if times else (None, None)
    return Run("", "", columns, events, begins[1:], *span, lines=0, unreadable=0, notes=notes)


def _last_row(columns: dict[str, list[Number | None]]) -> int:
    """Index of the row written last, which after a restart need not be the one with the highest step; -1 if none."""
    attempts = columns["attempt"]
    return len(attempts) - 1 - attempts[::-1].index(max(attempts)) if attempts else -1


def _add_step_times(columns: dict[str, list[Number | None]]) -> None:
    """A console log states no step time: take the time between two lines over the number of steps between them."""
    steps, attempts, times = columns["step"], columns["attempt"], columns.get("time")
    if times is None:
        return
    step_s: list[Number | None] = [None] * len(steps)
    for i in range(1, len(steps)):
        if attempts[i] == attempts[i - 1] and times[i] is not None and times[i - 1] is not None:
            step_s[i] = (times[i] - times[i - 1]) / (steps[i] - steps[i - 1])
    columns["step_s"] = step_s


def _log_files(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir() if p.suffix in (".log", ".txt", ".out", ".jsonl"))
    return f" Files there that may be one: {', '.join(names[:5])}." if names else ""
