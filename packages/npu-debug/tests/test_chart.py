"""The terminal chart, against drawings made by hand."""

import math

import pytest

from npu_debug.chart import chart


def test_falling_line():
    assert chart([1, 2, 3, 4], [3.0, 2.0, 1.0, 0.0], width=4, height=4, ascii_only=True).splitlines() == [
        "3 |*",
        "  | *",
        "  |  *",
        "0 |   *",
        "  +----",
        "   1  4",
    ]


def test_braille_dots():
    # Two by four dots per character: a diagonal from the lower left to the upper right fills two dots of a character.
    top = chart([0, 1, 2, 3, 4, 5, 6, 7], [0.0, 1, 2, 3, 4, 5, 6, 7], width=4, height=2).splitlines()
    assert top[0] == "7 │  ⡠⠊"
    assert top[1] == "0 │⡠⠊"


def test_jump_is_drawn_as_a_connected_line():
    drawing = chart([0, 1], [0.0, 1.0], width=2, height=5, ascii_only=True).splitlines()
    assert [line[3:] for line in drawing[:5]] == [" *", " *", " *", " *", "*"]


def test_range_that_no_float_holds():
    # 1e308 - -1e308 is infinite; the middle row of five is 0.
    drawing = chart([0, 1, 2], [1e308, 0.0, -1e308], width=3, height=5, ascii_only=True).splitlines()
    assert [line.partition("|")[0].strip() for line in drawing[:5:4]] == ["1e+308", "-1e+308"]
    assert [line.partition("|")[2] for line in drawing[:5]] == ["*", " *", " *", "  *", "  *"]


def test_constant_line_and_gaps():
    drawing = chart([0, 1, 2], [5.0, None, 5.0], width=3, height=3, ascii_only=True).splitlines()
    assert [line.partition("|")[2] for line in drawing[:3]] == ["", "***", ""]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_marked_on_the_axis(bad):
    drawing = chart([0, 1, 2, 3, 4], [1.0, 2.0, bad, 2.0, 1.0], width=5, height=2, ascii_only=True).splitlines()
    assert drawing[2].endswith("+--!--")


@pytest.mark.parametrize("values", [[], [1.0], [math.nan, None, 1.0]])
def test_too_few_values_give_nothing(values):
    assert chart(list(range(len(values))), values) == ""
