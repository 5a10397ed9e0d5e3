"""The command line: what it understands, and what it answers to wrong input."""

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from npu_train import __version__, cli
from npu_train.errors import InputError
from npu_train.recipes import RECIPES


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_help_is_immediate() -> None:
    """0.3 s of processor time, the best of a few tries: other tests may run at the same time."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "npu_train", "--help"], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        assert "npu-train COMMAND" in done.stdout
    assert min(seconds) < 0.3, seconds


@pytest.mark.parametrize("arguments", [["run", "--help"], ["recipes"], ["recipes", "--json"], ["--version"]])
def test_light_commands_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from npu_train.cli import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"npu-train {__version__}\n"


def test_recipes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(RECIPES)
    assert all(set(row) == {"name", "model", "size", "purpose", "needs"} for row in rows)


def test_options_are_told_apart() -> None:
    line = (
        "quickstart --nproc=2 --training.steps 5 --data my.txt --verbose --rdzv_endpoint h:1 --standalone "
        "--debug.seed 3 --debug activation-checkpoint:full --dump_folder out"
    )
    recipe, values, flags, torchrun, options = cli._split(shlex.split(line))
    assert recipe == "quickstart"
    assert values == {"--nproc": "2", "--data": "my.txt", "--dump-folder": "out"}
    assert flags == {"--verbose", "--debug"}
    assert torchrun == ["--rdzv-endpoint", "h:1", "--standalone"]
    assert options == ["--training.steps", "5", "--debug.seed", "3", "activation-checkpoint:full"]


def test_each_new_run_of_a_recipe_has_its_own_folder(in_tmp: Path) -> None:
    def folder(*arguments: str) -> str:
        return cli._read_request(["quickstart", *arguments])[0].dump_folder

    assert folder() == "outputs/quickstart"
    (in_tmp / "outputs" / "quickstart").mkdir(parents=True)
    assert folder() == "outputs/quickstart-2"
    (in_tmp / "outputs" / "quickstart-2").mkdir()
    (in_tmp / "outputs" / "quickstart-10").mkdir()
    (in_tmp / "outputs" / "quickstart-old").mkdir()
    assert folder() == "outputs/quickstart-11"
    assert folder("--resume") == "outputs/quickstart-10"
    assert folder("--dump-folder", "mine") == "mine"


def test_resume_passes_over_runs_without_a_checkpoint(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("", "-2", "-3", "-4"):
        (in_tmp / "outputs" / f"quickstart{number}" / "checkpoint" / "step-5").mkdir(parents=True)
    (in_tmp / "outputs" / "quickstart-2" / "checkpoint" / "step-5" / ".metadata").write_text("")
    assert cli._read_request(["quickstart", "--resume"])[0].dump_folder == "outputs/quickstart-2"
    assert capsys.readouterr().out == (
        "note: --resume takes outputs/quickstart-2: there is no finished checkpoint in outputs/quickstart-3, "
        "outputs/quickstart-4.\n"
    )


def test_torchruns_own_names_are_understood() -> None:
    request, launch, *_ = cli._read_request(["quickstart", "--nproc-per-node", "3", "--nnodes", "1", "--role", "x"])
    assert (launch.nproc, launch.torchrun, launch.multi_node) == ("3", ("--nnodes", "1", "--role", "x"), False)
    assert (launch.world_size, request.options) == (3, ())


def test_two_runs_started_at_once_do_not_share_a_folder(in_tmp: Path) -> None:
    first, second = (cli._read_request(["quickstart"])[0].dump_folder for _ in range(2))
    assert first == second
    cli._claim(first)
    with pytest.raises(InputError, match="another run has just taken outputs/quickstart"):
        cli._claim(second)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--training.steps", "5", "--a", "1"], ["--a", "1"]),
        (["--a", "--training.steps=5"], ["--a"]),
        (["--training.seq_len", "5"], ["--training.seq_len", "5"]),
    ],
)
def test_options_that_are_repeated_in_the_next_command(options: list[str], left: list[str]) -> None:
    assert cli._without_steps(tuple(options)) == left


BAD = {
    "empty value": (["run", "quickstart", "--data", ""], "the value of --data is empty"),
    "no arguments": ([], "usage"),
    "command": (["trian"], "unknown command 'trian'. Near matches: "),
    "nothing to train": (["run", "--nproc", "2"], "give a recipe"),
    "recipe": (["run", "quikstart"], "unknown recipe 'quikstart'. Near matches: quickstart"),
    "recipe and module": (["run", "quickstart", "--module", "llama3"], "Give one of them"),
    "nproc": (["run", "quickstart", "--nproc", "two"], "--nproc is 'two'"),
    "nproc in another script": (["run", "quickstart", "--nproc", "²"], "--nproc is '²'"),
    "nproc of a million": (["run", "quickstart", "--nproc", "1000000"], "which this machine cannot run. Give at most"),
    "text field without data": (["run", "quickstart", "--text-field", "foo"], "names a field of --data"),
    "value missing": (["run", "quickstart", "--data"], "--data needs a value"),
    "value missing before an option": (["run", "quickstart", "--data", "--verbose"], "--data needs a value"),
    "resume nothing": (["run", "quickstart", "--resume"], "there is no run in outputs/quickstart yet"),
    "several nodes": (["run", "quickstart", "--nnodes", "2"], "name it with --dump-folder"),
    "sample without a checkpoint": (["sample", "--prompt", "x"], "--checkpoint"),
    "sample from nowhere": (["sample", "--checkpoint", "nowhere", "--prompt", "x"], "there is no checkpoint nowhere"),
    "sample nothing": (
        ["sample", "--checkpoint", ".", "--prompt", "x", "--max-new-tokens", "0"],
        "--max-new-tokens is 0; it must be at least 1",
    ),
    "recipes option": (["recipes", "--jsn"], "--jsn"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(in_tmp: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, message = BAD[case]
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert message in text
    assert "Traceback" not in text
    assert not (in_tmp / "outputs").exists()


def test_all_problems_are_told_at_once(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "quikstart", "--nproc", "zero"]) == 2
    error = capsys.readouterr().err
    assert "2 problems" in error
    assert "1. unknown recipe" in error
    assert "2. --nproc is 'zero'" in error


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK set, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "WORLD_SIZE=x is not a number",
        ),
    ],
)
def test_a_broken_launcher_environment(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict, message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "quickstart"]) == 2
    assert message in capsys.readouterr().err


def test_a_reader_that_stops_early(tmp_path: Path) -> None:
    command = f"{sys.executable} -m npu_train recipes | true"
    done = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), os.environ.get("PYTHONUNBUFFERED")
