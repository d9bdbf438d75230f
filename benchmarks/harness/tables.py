"""Printed tables by rich, as wide as the terminal or 80 columns.

A table whose numbers do not fit side by side becomes several, each with the columns that name a
row.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_FALLBACK = (80, 24)
_GAP = 2
# The width a first column of long texts shrinks to before a table is divided.
_LEAST_FIRST = 24


@dataclass(frozen=True)
class _Column:
    header: str
    cells: tuple[str, ...]
    # Cells begin with a number.
    is_numeric: bool

    @property
    def natural(self) -> int:
        """Return the width without wrapping."""
        return max(len(line) for text in self._texts for line in text.split("\n"))

    @property
    def least(self) -> int:
        """Return the width below which a word or a number would be cut."""
        words = [word for text in self._texts for word in text.split()]
        least = max(map(len, words), default=0)
        # A number and its range stay on one line.
        return max([least, *map(len, self.cells)]) if self.is_numeric else least

    @property
    def _texts(self) -> tuple[str, ...]:
        return (self.header, *self.cells)


def text(
    rows: Iterable[Sequence[object]],
    headers: Sequence[str] = (),
    floats: str = "g",
    keys: int = 1,
    width: int | None = None,
) -> str:
    """Return a table.

    Args:
        rows: Cells; None is an empty one.
        headers: Of the columns; a line break is kept.
        floats: Format of floating-point numbers.
        keys: Number of leading columns that name a row.
        width: Of the output in columns; the terminal's, or 80, if None.
    """
    width = width or shutil.get_terminal_size(_FALLBACK).columns
    cells = [[_cell(value, floats) for value in row] for row in rows]
    count = max([len(headers), *map(len, cells)])
    columns = [
        _column(
            headers[place] if place < len(headers) else "",
            tuple(row[place] if place < len(row) else "" for row in cells),
        )
        for place in range(count)
    ]
    parts = [_rendered(block, bool(headers), width) for block in _blocks(columns, keys, width)]
    return "\n\n".join(parts)


def _cell(value: object, floats: str) -> str:
    if value is None:
        return ""
    return format(value, floats) if isinstance(value, float) else str(value)


def _column(header: str, cells: tuple[str, ...]) -> _Column:
    filled = [cell for cell in cells if cell]
    numeric = bool(filled) and all(cell[0] in "0123456789+-–" for cell in filled)
    return _Column(header, cells, numeric)


def _blocks(columns: Sequence[_Column], keys: int, width: int) -> list[list[_Column]]:
    """Return the columns of each table: as many as fit beside those that name a row."""
    names, others = columns[:keys], columns[keys:]
    first_width = sum(max(one.least, min(one.natural, _LEAST_FIRST)) for one in names)
    first_width += _GAP * (len(names) - 1)
    blocks: list[list[_Column]] = [[*names]]
    used = first_width
    for column in others:
        if len(blocks[-1]) > len(names) and used + _GAP + column.least > width:
            blocks.append([*names])
            used = first_width
        blocks[-1].append(column)
        used += _GAP + column.least
    return blocks


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Return the widths of columns: the widest shrink first, and a number only as the last."""
    widths = [column.natural for column in columns]
    limits = [column.least for column in columns]
    space = width - _GAP * (len(columns) - 1)
    while sum(widths) > space:
        able = [place for place, limit in enumerate(limits) if widths[place] > limit]
        # No word is kept whole in a terminal that is narrower than the longest words.
        if not able:
            limits = [1] * len(columns)
            able = [place for place, one in enumerate(widths) if one > 1]
            if not able:
                break
        widths[max(able, key=lambda place: widths[place])] -= 1
    return widths


def _rendered(columns: Sequence[_Column], has_header: bool, width: int) -> str:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_header=has_header,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column, own in zip(columns, _widths(columns, width), strict=True):
        justify = "right" if column.is_numeric else "left"
        table.add_column(Text(column.header), justify=justify, width=own, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    to = Console(file=io.StringIO(), width=width, color_system=None)
    to.print(table)
    assert isinstance(to.file, io.StringIO)
    lines = to.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)
