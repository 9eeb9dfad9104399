"""Cells of a parametrized test: those of the default suite, and the others, which are slow."""

import itertools

import pytest


def slow(*cells) -> list:
    """These cells, slow; a tuple has a value for each name."""
    return [pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=pytest.mark.slow) for cell in cells]


def but_slow(cells, quick) -> list:
    """All cells; those that are not in `quick` are slow."""
    return [cell if cell in quick else slow(cell)[0] for cell in cells]


def each_alone(*axes) -> list:
    """The product of `axes`; cells with two values or more that are not the first of their axis are slow.

    For a path that each value takes by itself: a fault of one is seen beside the first values of the others.
    """
    axes = tuple(map(list, axes))
    cells = list(itertools.product(*axes))
    firsts = [axis[0] for axis in axes]
    return but_slow(cells, [c for c in cells if sum(a != b for a, b in zip(c, firsts, strict=True)) < 2])
