"""The command `npu-debug`. Every import that takes time happens inside the command that needs it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from npu_debug.errors import InputError

if TYPE_CHECKING:
    from npu_debug.logs import Run, Summary

OK, PROBLEM, UNUSABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program name; those of the process when None.

    Returns:
        Exit code: 0 done, 1 the thing examined has a problem, 2 the input is unusable.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # What comes after -- is a program of the user with options of its own.
    own, program = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, None)
    try:
        code = _dispatch(own, program)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe, such as head, has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        problem = error
        message = str(error)
    if not isinstance(problem, InputError):
        message = (
            f"npu-debug failed with {type(problem).__name__}: {problem}. This is a defect of npu-debug, not of your "
            "input; run it again with --debug and report the traceback."
        )
    if "--debug" in own:
        import traceback

        traceback.print_exception(problem)
    print(f"npu-debug: {message}", file=sys.stderr)
    return UNUSABLE


def _dispatch(argv: list[str], program: list[str] | None) -> int:
    parser, commands = _parser()
    args, unknown = parser.parse_known_args(argv)
    if args.version:
        # Costs a tenth of a second to import.
        from importlib.metadata import version

        print(f"npu-debug {version('npu-debug')}")
        return OK
    if unknown:
        command = commands.get(args.command, parser)
        if args.command == "sim" and program is None and not unknown[0].startswith("-"):
            raise InputError(
                f"Write -- before the program, so that its options are not taken for those of npu-debug: "
                f"npu-debug sim [options] -- {' '.join(unknown)}"
            )
        _unknown("argument", unknown[0], [*parser._option_string_actions, *command._option_string_actions])
    if args.command is None:
        parser.print_help(sys.stderr)
        return UNUSABLE
    if args.command == "sim":
        args.program = program
    elif program is not None:
        raise InputError(f"npu-debug {args.command} starts no program; leave -- and what follows it out.")
    return args.function(args)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. See {self.prog} --help.")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            _unknown("command", str(value), list(action.choices))


def _parser() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    # Accepted before and after the name of the command.
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = _Parser(
        prog="npu-debug",
        description="Find out why a training run is slow, wrong, hung or out of memory, from the files it leaves.",
        epilog="Exit codes: 0 done, 1 the thing examined has a problem, 2 the input is unusable.",
        parents=[debug],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    logs = commands.add_parser(
        "logs",
        help="summarise and draw the metrics of training runs",
        description="Summarise and draw the metrics of training runs.",
        epilog="Exit codes: 0 fine, 1 a loss, gradient norm or learning rate is not finite, 2 the input is unusable.",
        parents=[debug],
        allow_abbrev=False,
    )
    logs.add_argument(
        "runs", nargs="+", metavar="RUN", help="output folder, metrics.jsonl or torchtitan console log; - is stdin"
    )
    logs.add_argument("--json", action="store_true", help="print the summaries as a JSON list")
    logs.add_argument("--plot", metavar="FILE", help="draw the fields of all runs into FILE (.png or .svg)")
    logs.add_argument("--field", metavar="NAME,...", help="columns to draw, separated by commas (default: loss)")
    logs.set_defaults(function=_logs, command="logs")
    sim = commands.add_parser(
        "sim",
        help="run a program on simulated Ascend devices",
        usage="npu-debug sim [options] -- PROGRAM [arguments]",
        description="Run a program on simulated Ascend devices: the real torch_npu, on a machine without NPU and CANN.",
        epilog="examples:\n"
        "  npu-debug sim -- python train.py\n"
        "  npu-debug sim --nproc 4 -- torchrun train.py\n\n"
        "An option that is not given comes from its variable: NPU_SIM_SOC, NPU_SIM_DEVICES, NPU_SIM_MEMORY,\n"
        "NPU_SIM_TRACE, NPU_SIM_STRICT_CUDA=1. The exit code is the program's; 2 where it could not be started.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[debug],
        allow_abbrev=False,
    )
    sim.add_argument("--nproc", metavar="N", help="processes on this machine, started by torchrun")
    sim.add_argument("--soc", metavar="NAME", help="Ascend910B1 (default), Ascend910_9391, Ascend950PR_9599, ...")
    sim.add_argument("--devices", metavar="N", help="number of devices, 1 to 64 (default: 8)")
    sim.add_argument("--memory", metavar="SIZE", help="memory of each device (default: 64GiB)")
    sim.add_argument("--trace", metavar="FILE", help="append every device call to FILE, a line of JSON each")
    sim.add_argument("--strict-cuda", action="store_true", help="any use of torch.cuda by the program raises")
    sim.set_defaults(function=_sim, command="sim", program=None)
    return parser, commands.choices


def _sim(args: argparse.Namespace) -> int:
    from npu_debug.simulation import command, settings

    chosen = settings.read(vars(args))
    if args.nproc is not None and (not args.nproc.isdecimal() or int(args.nproc) < 1):
        raise InputError(f"--nproc {args.nproc} is not a number of processes. Give 1 or more.")
    command.run(args.program or [], chosen, None if args.nproc is None else int(args.nproc))


def _unknown(what: str, given: str, known: Sequence[str]) -> NoReturn:
    import difflib

    near = difflib.get_close_matches(given.split("=")[0], dict.fromkeys(known), n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(dict.fromkeys(known))}."
    raise InputError(f"There is no {what} {given!r}. {hint}")


def _logs(args: argparse.Namespace) -> int:
    from npu_debug.logs import read_run, summarise

    if args.runs.count("-") > 1:
        raise InputError("Standard input (-) was given more than once. It can be read as one run only.")
    runs, errors = [], []
    progress = _Progress()
    for path in args.runs:
        try:
            runs.append(read_run(path, progress))
        except InputError as error:
            errors.append(str(error))
    progress.clear()
    if errors:
        raise InputError("\n".join(errors))
    fields = _fields(args.field, runs)
    summaries = [summarise(run) for run in runs]
    if args.plot is not None:
        # Before anything is printed, so that a plot that cannot be drawn leaves no half answer.
        from npu_debug.plot import plot

        plot(runs, args.plot, fields)
    if args.json:
        import json

        listed = [
            {"run": run.name, "format": run.format, "unreadable_lines": run.unreadable, "notes": run.notes}
            | found.as_json()
            for run, found in zip(runs, summaries, strict=True)
        ]
        print(json.dumps(listed, indent=2, allow_nan=False))
    else:
        texts = [_text(run, found, fields) for run, found in zip(runs, summaries, strict=True)]
        print(_printable("\n\n".join(texts)))
        if args.plot:
            print(f"\nplot written to {args.plot}")
    return PROBLEM if any(found.problem for found in summaries) else OK


def _fields(names: str | None, runs: Sequence[Run]) -> list[str]:
    if names is None:
        return ["loss"]
    known = list(dict.fromkeys(key for run in runs for key in run.steps if key not in ("step", "attempt", "time")))
    fields = [name.strip() for name in names.split(",") if name.strip()]
    if not fields:
        raise InputError("--field names no column. Give one or more, separated by commas, such as loss,grad_norm.")
    for name in fields:
        # A run that died before its first step has no columns, and its summary says so.
        if known and name not in known:
            _unknown("column", name, known)
    return fields


def _text(run: Run, found: Summary, fields: Sequence[str]) -> str:
    from npu_debug.chart import chart

    rows: list[tuple[str, str | None]] = [
        ("steps", f"{found.first_step} to {found.last_step}, {found.logged_steps} logged, {found.status}"),
        ("loss", _loss(found)),
        ("validation", _at(found.validation_loss, ".4f", found.validation_step)),
        ("grad norm", _at(found.grad_norm_max, ".4g", found.grad_norm_max_step, "max ")),
        ("tokens/s", _value(found.tokens_per_s_median, ",.0f", "median ")),
        ("step time", _value(found.step_s_median, ".3g", "median ", f" s, p95 {found.step_s_p95 or 0:.3g} s")),
        ("slow steps", _steps(found.slow_steps)),
        ("memory", _value(found.memory_gib_max, ".2f", "max ", " GiB")),
        ("wall time", None if found.wall_s is None else _duration(found.wall_s)),
        ("restarts", f"{len(found.restarts)}, {_restarts(found.restarts)}" if found.restarts else None),
        ("NOT FINITE", "; ".join(_steps(at, f"{what} at step ") for what, at in found.nonfinite.items())),
    ]
    if found.first_step is None:
        rows[0] = ("steps", f"none logged, {found.status}")
    lines = [run.name, *(f"  {name:<11} {value}" for name, value in rows if value)]
    lines += [f"  note: {note}" for note in run.notes]
    plain = bool(os.environ.get("NO_COLOR")) or "utf" not in (sys.stdout.encoding or "").lower()
    for name in fields:
        drawing = chart(run.steps["step"], run.steps[name], ascii_only=plain) if name in run.steps else ""
        if drawing:
            lines += ["", f"  {name}", *(f"  {line}" for line in drawing.splitlines())]
    return "\n".join(lines)


def _printable(text: str) -> str:
    """Text that the terminal's encoding can show."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _loss(found: Summary) -> str | None:
    if found.first_loss is None or found.last_loss is None:
        return _at(found.best_loss, ".4f", found.best_step, "best ")
    text = f"{_number(found.first_loss, '.4f')} -> {_number(found.last_loss, '.4f')}"
    if found.drop_nats is not None:
        change = "down" if found.drop_nats >= 0 else "UP"
        text += f", {change} {_number(abs(found.drop_nats), '.4f')} nats"
    return text if found.best_loss is None else f"{text}, {_at(found.best_loss, '.4f', found.best_step, 'best ')}"


def _value(value: float | None, form: str, before: str = "", after: str = "") -> str | None:
    return None if value is None else f"{before}{_number(value, form)}{after}"


def _number(value: float, form: str) -> str:
    # A fixed number of decimals would print 1e300 with 300 digits.
    return f"{value:{form if abs(value) < 1e15 else '.4g'}}"


def _at(value: float | None, form: str, step: int | None, before: str = "") -> str | None:
    return _value(value, form, before, f" at step {step}")


def _steps(steps: Sequence[int], before: str = "", most: int = 8) -> str | None:
    if not steps:
        return None
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return f"{before}{', '.join(map(str, steps[:most]))}{more}"


def _restarts(steps: Sequence[int | None]) -> str:
    return ", ".join("no step logged" if step is None else f"first step {step}" for step in steps)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds >= 1e15:
        return f"{seconds:.4g} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


class _Progress:
    """Shows on a terminal how many lines were read once reading takes more than two seconds."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.shown = False

    def __call__(self, lines: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - self.begin > 2:
            self.shown = True
            print(f"\rreading, {lines:,} lines", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
