"""The ``npu-train`` command. Heavy imports happen inside the command that needs them, so that help is immediate."""

import argparse
import functools
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from . import __version__
from .checkpoints import was_checkpointed
from .console import say
from .errors import EXIT_DONE, EXIT_PROBLEM, InputError, RunFailed, near, report
from .files import path_problems
from .launch import TORCHRUN_OPTIONS, Launch, inherited_world_size, is_count
from .recipes import RECIPES, Recipe
from .request import RunRequest

HELP = """\
usage: npu-train COMMAND ...

Train language models with torchtitan on Ascend NPUs, or on any CPU machine first.

commands:
  run RECIPE [options]                    train a recipe
  run --module M --config C [options]     train a configuration of torchtitan, or of your own package
  recipes                                 list the recipes
  sample --checkpoint DIR --prompt TEXT   continue a text with trained weights

options:
  --help, --version

npu-train COMMAND --help explains a command; npu-train run RECIPE --help lists every option of torchtitan.
"""

RUN_HELP = """\
usage: npu-train run RECIPE [options] [torchtitan options]
       npu-train run --module MODULE --config CONFIG [options] [torchtitan options]

options:
  --data FILE          train on your own .txt, .jsonl or .parquet file, or a folder of them
  --text-field NAME    field of a .jsonl line or column of a .parquet file that holds the text (default: text)
  --nproc N            processes on this machine, started by torchrun (default 1)
  --device DEVICE      auto (NPU, else CUDA, else CPU), npu, cuda, cpu or sim (simulated NPUs)
  --dump-folder DIR    the run's folder (default for a recipe: the next free outputs/RECIPE)
  --resume             continue the run in --dump-folder, or the recipe's newest run with a checkpoint
  --verbose            print torchtitan's whole log
  --debug              show tracebacks

torchrun's options are passed on to it:
  {torchrun}
A process that torchrun has started already (RANK and WORLD_SIZE are set) trains as part of that job.

torchtitan's options follow its own command line, for example --training.steps 5 --training.seq-len 128;
npu-train run RECIPE --help lists them all.
"""

_OWN_VALUES = ("--module", "--config", "--nproc", "--device", "--data", "--text-field", "--dump-folder")
_ALIASES = {"--nproc-per-node": "--nproc"}
_OWN_FLAGS = ("--resume", "--verbose", "--debug")


def _program() -> str:
    """How to call this command from the user's shell."""
    here = Path(sys.executable).parent / "npu-train"
    found = shutil.which("npu-train")
    if found and (not here.exists() or Path(found).resolve() == here.resolve()):
        return "npu-train"
    return os.path.relpath(here)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. npu-train {self.prog.split()[-1]} --help explains the options.")


def _split(arguments: list[str]) -> tuple[str, dict[str, str], set[str], list[str], list[str]]:
    """Separate the recipe, our options, torchrun's and torchtitan's."""
    recipe, values, flags, torchrun, options = "", {}, set(), [], []
    queue = list(arguments)
    if queue and not queue[0].startswith("-"):
        recipe = queue.pop(0)
    while queue:
        argument = queue.pop(0)
        name, equals, value = argument.partition("=")
        # torchtitan's options may be written with underscores; so may ours.
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        name = _ALIASES.get(name, name)
        takes_value = name in _OWN_VALUES or TORCHRUN_OPTIONS.get(name, False)
        if takes_value and not equals:
            if not queue or queue[0].startswith("--"):
                raise InputError(f"{name} needs a value. npu-train run --help explains it.")
            value = queue.pop(0)
        if takes_value and not value:
            raise InputError(f"the value of {name} is empty. Is a shell variable not set?")
        if name in _OWN_VALUES:
            values[name] = value
        elif name in _OWN_FLAGS and not equals:
            flags.add(name)
        elif name in TORCHRUN_OPTIONS:
            torchrun += [name, value] if takes_value else [name]
        else:
            options.append(argument)
    return recipe, values, flags, torchrun, options


def _runs_of(recipe: str) -> list[tuple[int, Path]]:
    """Earlier runs of a recipe as (number, folder), oldest first."""
    pattern = re.compile(rf"{re.escape(recipe)}(?:-(\d+))?")
    found = ((pattern.fullmatch(path.name), path) for path in Path("outputs").glob("*") if path.is_dir())
    return sorted((int(match.group(1) or 1), path) for match, path in found if match)


def _dump_folder(recipe: str, values: dict[str, str], resume: bool, launch: Launch, inherited: int | None) -> str:
    """The run's folder: a new one for a new run, so that nothing of an earlier run is touched."""
    if "--dump-folder" in values or not recipe:
        return values.get("--dump-folder", "")
    if launch.multi_node:
        raise InputError("with --nnodes every node must write to the same folder: name it with --dump-folder.")
    runs = _runs_of(recipe)
    if resume:
        if not runs:
            raise InputError(f"--resume: there is no run in outputs/{recipe} yet. Start one without --resume.")
        return str(_newest_to_resume([path for _, path in runs]))
    if inherited is not None and inherited > 1:
        raise InputError(
            "the processes of a job that torchrun started cannot agree on a new folder by themselves: name it with "
            "--dump-folder."
        )
    return f"outputs/{recipe}-{runs[-1][0] + 1}" if runs else f"outputs/{recipe}"


def _newest_to_resume(runs: list[Path]) -> Path:
    """The newest of the runs that has a checkpoint; those that broke off before their first one are passed over."""
    with_checkpoint = [path for path in runs if was_checkpointed(path)]
    if not with_checkpoint:
        return runs[-1]
    skipped = runs[runs.index(with_checkpoint[-1]) + 1 :]
    if skipped and os.environ.get("RANK", "0") == "0":
        names = ", ".join(map(str, skipped))
        say(f"note: --resume takes {with_checkpoint[-1]}: there is no finished checkpoint in {names}.")
    return with_checkpoint[-1]


def _claim(folder: str) -> None:
    """Take a new run's folder; another run that was started at the same moment must not write to it too."""
    try:
        Path(folder).mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"another run has just taken {folder}. Start again.") from None


def _most_processes() -> int:
    """More processes than this on one machine are a slip of the keyboard."""
    return max(64, 16 * (os.cpu_count() or 1))


def _read_request(arguments: list[str]) -> tuple[RunRequest, Launch, int | None, bool]:
    """The request, how to start it, the world size that a launcher has set already, and whether its folder is new."""
    recipe_name, values, flags, torchrun, options = _split(arguments)
    problems = []
    module, config = values.get("--module", ""), values.get("--config", "")
    if recipe_name and (module or config):
        problems.append(f"both a recipe ({recipe_name}) and --module/--config are given. Give one of them.")
    elif recipe_name and recipe_name not in RECIPES:
        problems.append(
            f"unknown recipe '{recipe_name}'. Near matches: {near(recipe_name, list(RECIPES))}. "
            "npu-train recipes lists them all."
        )
    elif recipe_name:
        module, config = RECIPES[recipe_name].module, RECIPES[recipe_name].config
    elif not (module and config):
        problems.append(
            "nothing to train: give a recipe (npu-train recipes lists them) or --module and --config, "
            "for example --module llama3 --config llama3_debugmodel."
        )
    nproc = values.get("--nproc", "1")
    if not (is_count(nproc) and int(nproc) > 0) and nproc not in ("auto", "cpu", "gpu"):
        problems.append(f"--nproc is '{nproc}'. Give the number of processes on this machine, for example 2.")
    elif is_count(nproc) and int(nproc) > _most_processes():
        problems.append(f"--nproc is {nproc}, which this machine cannot run. Give at most {_most_processes()}.")
    if "--text-field" in values and "--data" not in values:
        problems.append("--text-field names a field of --data, which is not given. Add --data, or leave it out.")
    launch = Launch(nproc, tuple(torchrun))
    inherited = None
    try:
        inherited = inherited_world_size()
        if inherited is not None and not launch.in_process:
            problems.append(
                "torchrun has started this process already (RANK and WORLD_SIZE are set), so --nproc and torchrun's "
                "options belong on its command line."
            )
        folder = _dump_folder(recipe_name, values, "--resume" in flags, launch, inherited)
    except InputError as error:
        problems += error.problems
    if problems:
        paths = path_problems(values.get("--data", ""), values.get("--dump-folder", ""), options)
        raise InputError(*problems, *paths)
    request = RunRequest(
        module=module,
        config=config,
        options=tuple(options),
        recipe=recipe_name,
        device=values.get("--device", "auto"),
        # Absolute, so that the run's own record of it holds from anywhere.
        data=os.path.abspath(os.path.expanduser(values["--data"])) if values.get("--data") else "",
        text_field=values.get("--text-field", ""),
        dump_folder=folder,
        resume="--resume" in flags,
        verbose="--verbose" in flags,
        debug="--debug" in flags,
    )
    # A folder that the user named may hold a run to go on with, or be shared by several nodes.
    return request, launch, inherited, bool(recipe_name) and not request.resume and "--dump-folder" not in values


def _without_steps(options: tuple[str, ...]) -> list[str]:
    """torchtitan's options less ``--training.steps``."""
    kept = list(options)
    for i, option in enumerate(options):
        name = option.partition("=")[0].replace("_", "-")
        if name == "--training.steps":
            del kept[i : i + (1 if "=" in option else 2)]
            break
    return kept


def _epilogue(request: RunRequest, recipe: Recipe, launch: Launch) -> None:
    """Show what the model writes, and what to try next."""
    from .checkpoints import latest
    from .sample import sample
    from .worker import configure

    config, _ = configure(request)
    folder = config.dump_folder
    newest = latest(Path(folder) / config.checkpoint.folder)
    if newest is not None:
        try:
            for text in sample(config, newest.path, list(recipe.prompts), max_new_tokens=60):
                say(f"\nsample of step {newest.step}:\n  " + re.sub(r"\n+", "\n  ", text.strip()))
        except InputError as error:
            say(f"note: no sample: {error}")
    program = _program()
    data = ["--data", request.data] if request.data else []
    data += ["--text-field", request.text_field] if request.text_field else []
    device = ["--device", request.device] if request.device != "auto" else []
    same = [program, "run", recipe.name, *data, *device]
    steps = ["--training.steps", str(config.training.steps * 2)]
    suggestions = [([program.replace("npu-train", "npu-debug"), "logs", folder, "--plot", "loss.svg"], "plot its loss")]
    if newest is not None:
        runs = _runs_of(recipe.name)
        where = [] if runs and folder == str(runs[-1][1]) else ["--dump-folder", folder]
        layout = [] if launch.in_process else ["--nproc", launch.nproc, *launch.torchrun]
        again = [*same, *layout, *where, "--resume", *steps, *_without_steps(request.options)]
        suggestions.insert(0, (again, "continue for as long again"))
        suggestions.append(([program, "sample", "--checkpoint", folder, "--prompt", "It was"], "let it write"))
    if launch.in_process and not request.options and config.training.local_batch_size > 1:
        half = str(config.training.local_batch_size // 2)
        suggestions.append(([*same, "--nproc", "2", "--training.local-batch-size", half], "the same on 2 processes"))
    say("\nnext:")
    for command, meaning in suggestions:
        say(f"  {shlex.join(command)}\n      {meaning}")


def run(arguments: list[str]) -> int:
    """``npu-train run``."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(RUN_HELP.format(torchrun="\n  ".join(_wrapped(list(TORCHRUN_OPTIONS)))))
        return EXIT_DONE if arguments else 2
    request, launch, inherited, new = _read_request(arguments)
    if request.verbose:
        os.environ["NPU_TRAIN_VERBOSE"] = "1"
    # Threads that wait should not hold a core that somebody else could use. Read once, when torch loads its OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Before torch is imported (device.py says why).
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from . import worker
    from .launch import single_process_environment, torchrun, torchrun_problems
    from .lock import refuse_if_locked

    if inherited is not None:
        return worker.guarded(request, inherited)
    # Everything is checked before a process starts or a folder is made; torchrun's processes check again what only they
    # can see.
    if launch.in_process:
        single_process_environment()
        code = worker.guarded(request, 1, claim=functools.partial(_claim, request.dump_folder) if new else None)
    else:
        config = worker.prepare(request, launch.world_size, announce=False, found=torchrun_problems(launch))
        if not launch.multi_node:
            refuse_if_locked(config.dump_folder)
        if not launch.multi_node and worker.tell_nothing_left(config, announce=True):
            code = EXIT_DONE
        else:
            if new:
                _claim(request.dump_folder)
            code = torchrun(launch, [request.to_json()], functools.partial(worker.kept, config))
    recipe = RECIPES.get(request.recipe)
    if code == EXIT_DONE and recipe is not None and recipe.prompts and not launch.multi_node:
        _epilogue(request, recipe, launch)
    return code


def _wrapped(words: list[str], width: int = 100) -> list[str]:
    import textwrap

    return textwrap.wrap(" ".join(words), width)


def recipes(arguments: list[str]) -> int:
    """``npu-train recipes``."""
    parser = _Parser(prog="npu-train recipes", description="List the recipes that npu-train run starts by name.")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args(arguments)
    if options.json:
        rows = [
            {key: getattr(r, key) for key in ("name", "model", "size", "purpose", "needs")} for r in RECIPES.values()
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return EXIT_DONE
    for recipe in RECIPES.values():
        print(f"{recipe.name}\n    {recipe.model}, {recipe.size} parameters\n    {recipe.purpose}")
        if recipe.needs:
            print(f"    needs: {recipe.needs}")
    return EXIT_DONE


def sample(arguments: list[str]) -> int:
    """``npu-train sample``."""
    parser = _Parser(prog="npu-train sample", description="Continue a text with the weights of a checkpoint.")
    parser.add_argument("--checkpoint", required=True, help="a run's folder, its checkpoint folder, or a step-N folder")
    parser.add_argument("--prompt", action="append", required=True, help="the text to continue; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, help="sample among the k likeliest tokens; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, npu, cuda, cpu or sim")
    parser.add_argument("--module", default="", help="with --config: the model, where the run left no run.json")
    parser.add_argument("--config", default="")
    parser.add_argument("--hf-assets-path", default="", help="the tokenizer's folder, where it is not the run's own")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    limits = {
        "--max-new-tokens": (options.max_new_tokens, 1),
        "--temperature": (options.temperature, 0),
        "--top-k": (options.top_k, 0),
    }
    problems = [
        f"{name} is {value}; it must be at least {least}." for name, (value, least) in limits.items() if value < least
    ]
    if problems:
        raise InputError(*problems)
    # The folder is looked at before torch is imported.
    if not Path(options.checkpoint).expanduser().exists():
        raise InputError(
            f"there is no checkpoint {options.checkpoint}. Give --checkpoint a run's folder or a step-N folder in it."
        )
    from .worker import configure, request_of_run

    if bool(options.module) != bool(options.config):
        raise InputError("--module and --config belong together: give both or neither.")
    request = RunRequest(options.module, options.config) if options.module else request_of_run(Path(options.checkpoint))
    config, _ = configure(RunRequest(**{**request.to_dict(), "device": options.device, "data": "", "resume": False}))
    if options.hf_assets_path:
        config.hf_assets_path = options.hf_assets_path

    from .check import check_tokenizer
    from .sample import resolve_checkpoint
    from .sample import sample as generate_texts

    checkpoint = resolve_checkpoint(options.checkpoint)
    problems = check_tokenizer(config)
    if problems:
        raise InputError(*problems)
    texts = generate_texts(
        config,
        checkpoint.path,
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    for prompt, text in zip(options.prompt, texts, strict=True):
        row = {"step": checkpoint.step, "prompt": prompt, "text": text}
        print(json.dumps(row, ensure_ascii=False) if options.json else text)
    return EXIT_DONE


COMMANDS = {"run": run, "recipes": recipes, "sample": sample}


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return EXIT_DONE if arguments else 2
    if arguments[0] == "--version":
        print(f"npu-train {__version__}")
        return EXIT_DONE
    try:
        if arguments[0] not in COMMANDS:
            raise InputError(f"unknown command '{arguments[0]}'. Near matches: {near(arguments[0], list(COMMANDS))}.")
        return COMMANDS[arguments[0]](arguments[1:])
    except (InputError, RunFailed) as error:
        if "--debug" in arguments:
            raise
        return report("npu-train", error)
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except KeyboardInterrupt:
        print("npu-train: interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in arguments:
            raise
        told = f"npu-train: failed: {type(error).__name__}: {error}"
        print(f"{told} (run again with --debug for the traceback)", file=sys.stderr)
        return EXIT_PROBLEM
