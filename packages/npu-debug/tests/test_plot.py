"""Plots as files. The pixels are matplotlib's business; that the right lines are there is checked in the SVG."""

import stat
import sys

import pytest

from npu_debug.cli import main
from npu_debug.errors import InputError
from npu_debug.logs import read_run
from npu_debug.plot import _label, plot

pytest.importorskip("matplotlib", reason="install npu-debug[plot] to run the plot tests")


def make(tmp_path, name, losses="3.0 2.0 NaN 1.0"):
    path = tmp_path / name
    rows = [f'{{"step": {i}, "loss": {v}, "grad_norm": 1.0}}\n' for i, v in enumerate(losses.split())]
    path.write_text("".join(rows))
    return str(path)


def test_png_and_svg(tmp_path, capsys):
    one, two = make(tmp_path, "one.jsonl"), make(tmp_path, "two.jsonl", "5.0 4.0")
    png, svg = tmp_path / "a.png", tmp_path / "a.SVG"
    assert main(["logs", one, two, "--plot", str(png), "--field", "loss,grad_norm"]) == 1
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["logs", one, two, "--plot", str(svg)]) == 1
    assert "<svg" in svg.read_text()
    assert f"plot written to {svg}" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.SVG", "a.png", "one.jsonl", "two.jsonl"]
    assert stat.S_IMODE(png.stat().st_mode) & 0o044 == 0o044
    assert "matplotlib.pyplot" not in sys.modules


def test_names_that_fonts_and_markup_do_not_like(tmp_path):
    # Warnings are errors: a missing glyph or a label that the legend drops would fail here.
    runs = [read_run(make(tmp_path, name)) for name in ("训练一.jsonl", "a$b_{$.jsonl", "😀.jsonl")]
    runs[0].name, runs[1].name = "_训练一", "$x$"
    plot(runs, tmp_path / "a.png", ["loss"])
    plot(runs[:1], tmp_path / "b.svg", ["loss", "grad_norm"])
    assert (tmp_path / "a.png").stat().st_size > 0
    assert _label("$x$", ["DejaVu Sans"]) == r"\$x\$"


@pytest.mark.parametrize("losses", ["Infinity -1e308 1e308", "1e308", "1.0 1e308 2.0", "-1e300 1e300"])
def test_largest_floats_are_drawn_or_left_out(tmp_path, losses):
    plot([read_run(make(tmp_path, "one.jsonl", losses))], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_run_without_the_column_is_left_out(tmp_path):
    with_lr = tmp_path / "lr.jsonl"
    with_lr.write_text('{"step": 1, "lr": 0.1}\n{"step": 2, "lr": 0.2}\n')
    plot([read_run(with_lr), read_run(make(tmp_path, "one.jsonl"))], tmp_path / "a.png", ["lr"])
    assert (tmp_path / "a.png").exists()


def test_unusable_names(tmp_path):
    run = read_run(make(tmp_path, "one.jsonl"))
    with pytest.raises(InputError, match=r"has to end in \.png or \.svg"):
        plot([run], tmp_path / "a.pdf")
    with pytest.raises(InputError, match="cannot be written"):
        plot([run], tmp_path / "none" / "a.png")


def test_failure_leaves_neither_file_nor_fragment(tmp_path):
    target = tmp_path / "a.png"
    target.mkdir()
    run = read_run(make(tmp_path, "one.jsonl"))
    with pytest.raises(InputError, match="cannot be written"):
        plot([run], target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "one.jsonl"]
