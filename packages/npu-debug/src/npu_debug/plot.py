"""Draw columns of one or several runs into an image file. Needs matplotlib."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from npu_debug.errors import InputError
from npu_debug.logs import Run

SUFFIXES = (".png", ".svg")
# Beyond this matplotlib's own arithmetic overflows.
_LARGEST = 1e300
# Fonts with Chinese, Japanese and Korean characters that systems ship, for the names of runs.
_CJK_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei")


def plot(runs: Sequence[Run], file: str | Path, fields: Sequence[str] = ("loss",)) -> None:
    """Draw one panel per field with one line per run over the step number.

    A value that is not finite, or beyond 1e300 in size, is a gap in its line.

    The file appears under its name only when it is complete.

    Args:
        runs: Runs from `read_run`.
        file: Path ending in .png or .svg.
        fields: Columns of `Run.steps`; a run without a column is left out of its panel.

    Raises:
        InputError: matplotlib is missing, the suffix is another, or the file cannot be written.
    """
    name, file = str(file), Path(file)
    if file.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"{name or repr(name)} cannot be drawn: the name of a plot has to end in {' or '.join(SUFFIXES)}."
        )
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "Drawing a plot needs matplotlib, which is not installed: pip install 'npu-debug[plot]'."
        ) from None

    families = _families()
    with matplotlib.rc_context({"font.family": families}):
        figure = Figure(figsize=(8, 1 + 3 * len(fields)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(fields), squeeze=False, sharex=True)[:, 0]
        for panel, name in zip(panels, fields, strict=True):
            for run in runs:
                if name in run.steps:
                    values = [v if v is not None and abs(v) <= _LARGEST else math.nan for v in run.steps[name]]
                    style = {"linewidth": 1.2, "marker": "." if len(values) < 50 else ""}
                    panel.plot(run.steps["step"], values, label=_label(run.name, families), **style)
            panel.set_ylabel(_label(name, families))
            panel.grid(alpha=0.3)
            if len(runs) > 1:
                panel.legend(fontsize="small")
        panels[-1].set_xlabel("step")
        if len(runs) == 1:
            panels[0].set_title(_label(runs[0].name, families))
        try:
            # In the same folder, so that the rename cannot cross file systems.
            with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as part:
                pass
            try:
                figure.savefig(part.name, format=file.suffix[1:].lower(), dpi=120)
                os.chmod(part.name, 0o666 & ~_umask())
                os.replace(part.name, file)
            except BaseException:
                os.unlink(part.name)
                raise
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error.strerror}. Name a folder that exists.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _families() -> list[str]:
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _CJK_FONTS if name in installed)]


def _label(text: str, families: list[str]) -> str:
    """Text that the fonts can show and that matplotlib takes literally."""
    from matplotlib import font_manager

    known: set[int] = set()
    for family in families:
        known |= font_manager.get_font(font_manager.findfont(family)).get_charmap().keys()
    shown = "".join(c if ord(c) in known else c.encode("ascii", "backslashreplace").decode() for c in text)
    shown = shown.replace("$", r"\$")
    # matplotlib keeps a label with a leading underscore out of the legend.
    return f"./{shown}" if shown.startswith("_") else shown
