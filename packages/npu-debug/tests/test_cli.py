"""The command line: what it prints, its exit codes and its messages."""

import io
import json
import math
import resource
import subprocess
import sys

import pytest

from npu_debug.cli import main


@pytest.fixture
def run(tmp_path):
    def write(name: str = "run", losses: tuple[float, ...] = (4.0, 3.0, 2.0), **more: object) -> str:
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"step": i, "time": 100.0 + i, "loss": v, "grad_norm": 1.0, **more} for i, v in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder)

    return write


def test_summary_then_chart(run, capsys):
    path = run(step_s=0.5)
    assert main(["logs", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}\n  steps       1 to 3, 3 logged, unfinished\n")
    assert "loss        4.0000 -> 2.0000, down 2.0000 nats, best 2.0000 at step 3" in out
    assert "step time   median 0.5 s, p95 0.5 s" in out
    assert out.index("steps") < out.index("│")


@pytest.mark.parametrize("reason", ["NO_COLOR", "encoding"])
def test_chart_is_ascii_when_asked_or_needed(run, capsys, monkeypatch, reason):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if reason == "encoding" else "utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    if reason == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["logs", run("läuft")]) == 0
    stream.flush()
    text = stream.buffer.getvalue().decode()
    assert "*" in text
    assert text.replace("ä", "").isascii()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_is_exit_code_1(run, capsys, bad):
    assert main(["logs", run("good"), run("bad", (4.0, bad, 3.0))]) == 1
    assert "NOT FINITE  loss at step 2\n" in capsys.readouterr().out


def test_learning_rate_and_validation_loss_are_judged(tmp_path, capsys):
    lines = [
        '{"step": 1, "time": 1.0, "loss": 4.0, "grad_norm": 1.0, "lr": NaN}',
        '{"event": "validation", "time": 2.0, "step": 1, "loss": NaN}',
        '{"event": "end", "time": 3.0, "step": 1}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["logs", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 logged, finished" in out
    assert "NOT FINITE  learning rate at step 1; validation loss at step 1\n" in out


def test_largest_floats_print_short_lines(tmp_path, capsys):
    rows = [("1e300", "Infinity"), ("2", "-1e308"), ("3", "1e308")]
    lines = [
        f'{{"step": {i}, "time": {time}, "loss": {loss}, "memory_gib": 1e300, "tokens_per_s": 1e300, "step_s": 1e300}}'
        for i, (time, loss) in enumerate(rows, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["logs", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "  loss        inf -> 1e+308, best -1e+308 at step 2\n" in out
    assert "  tokens/s    median 1e+300\n" in out
    assert "  memory      max 1e+300 GiB\n" in out
    assert "  wall time   1e+300 s\n" in out
    assert "  NOT FINITE  loss at step 1\n" in out
    assert max(len(line) for line in out.splitlines()[1:]) < 100


def test_json(run, capsys):
    assert main(["logs", "--json", run("a"), run("b", (4.0, math.nan))]) == 1
    first, second = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (first["drop_nats"], first["format"], first["unreadable_lines"]) == (2.0, "metrics.jsonl", 0)
    assert (second["last_loss"], second["nonfinite_steps"]) == (None, [2])


def test_standard_input(run, capsys, monkeypatch):
    with open(f"{run()}/metrics.jsonl", "rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read())))
    assert main(["logs", "-"]) == 0
    assert capsys.readouterr().out.startswith("-\n")
    assert main(["logs", "-", "-"]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lgos"], "There is no command 'lgos'. Did you mean logs?"),
        (["zzz"], "There is no command 'zzz'. Known: logs"),
        (["logs", "x", "--jsn"], "There is no argument '--jsn'. Did you mean --json"),
        (["logs", "x", "--js"], "Did you mean --json"),
        (["logs", "x", "--plt=a.png"], "Did you mean --plot"),
        (["--verson"], "Did you mean --version"),
        (["logs"], "the following arguments are required: RUN"),
        (["logs", "/nowhere/at/all"], "There is no file or folder /nowhere/at/all."),
        (["logs", ""], "The name of a run is empty."),
    ],
)
def test_unusable_arguments(capsys, argv, message):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("npu-debug: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_every_unusable_run_is_named(run, capsys):
    assert main(["logs", "/nowhere/a", run(), "/nowhere/b"]) == 2
    err = capsys.readouterr().err
    assert "/nowhere/a" in err
    assert "/nowhere/b" in err


def test_unknown_field_suggests_a_near_one(run, capsys):
    path = run()
    assert main(["logs", path, "--field", "gradnorm"]) == 2
    assert "There is no column 'gradnorm'. Did you mean grad_norm?" in capsys.readouterr().err
    assert main(["logs", path, "--field", ","]) == 2
    assert main(["logs", path, "--field", "grad_norm, loss"]) == 0


def test_empty_plot_name(run, capsys):
    assert main(["logs", run(), "--plot", ""]) == 2
    captured = capsys.readouterr()
    assert "'' cannot be drawn: the name of a plot has to end in .png or .svg" in captured.err
    assert captured.out == ""


def test_run_without_steps(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"event": "start", "step": 0, "time": 1.0}\n')
    assert main(["logs", str(tmp_path)]) == 0
    assert "steps       none logged, unfinished" in capsys.readouterr().out
    assert main(["logs", str(tmp_path), "--field", "lr"]) == 0


def test_debug_shows_the_traceback_on_either_side(capsys):
    for argv in (["--debug", "logs", "/nowhere"], ["logs", "/nowhere", "--debug"]):
        assert main(argv) == 2
        assert "Traceback" in capsys.readouterr().err


def test_defect_of_the_program_is_one_sentence(run, capsys, monkeypatch):
    monkeypatch.setattr("npu_debug.logs.summarise", lambda run: 1 / 0)
    assert main(["logs", run()]) == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "--debug" in err
    assert "Traceback" not in err


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("npu-debug 0.")
    for argv in (["--help"], ["logs", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
    assert "Exit codes" in capsys.readouterr().out
    assert main([]) == 2


def test_module_and_closed_pipe(run):
    command = [sys.executable, "-m", "npu_debug"]
    done = subprocess.run([*command, "logs", run()], capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    with subprocess.Popen([*command, "logs", run("b")], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_help_answers_quickly():
    # Processor time, the best of a few: the machine that runs the tests has other things to do.
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "npu_debug", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3


def test_imports_need_the_standard_library_only():
    program = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "matplotlib", "pandas"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import npu_debug, npu_debug.logs, npu_debug.cli, npu_debug.chart, npu_debug.plot
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_plot_without_matplotlib_says_what_to_install(run, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["logs", run(), "--plot", str(tmp_path / "a.png")]) == 2
    captured = capsys.readouterr()
    assert "pip install 'npu-debug[plot]'" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "a.png").exists()
