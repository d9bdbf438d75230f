"""Blocks of the page docs/peers.md: one for each suite, replaced when the suite has run again."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.peers.outcomes import Row, Verdict, counts, summary, table

_HEADS = ("passed", "fails on mpidist", "fails with the peer, too", "needs a GPU", "not run")


def begin(name: str) -> str:
    """Return the line before a suite's block."""
    return f"<!-- peers: {name} -->"


END = "<!-- end -->"


def blocks(page: str) -> dict[str, str]:
    """Return the blocks of a page by the names of their suites."""
    found = re.findall(
        rf"^<!-- peers: ([\w -]+) -->\n(.*?)^{re.escape(END)}$", page, re.MULTILINE | re.DOTALL
    )
    return {name: text.strip("\n") for name, text in found}


def replaced(page: str, name: str, text: str) -> str:
    """Return a page with another block for a suite.

    Raises:
        ValueError: The page has no block of this name.
    """
    pattern = rf"^{re.escape(begin(name))}\n.*?^{re.escape(END)}$"
    block = f"{begin(name)}\n\n{text}\n\n{END}"
    page, count = re.subn(pattern, lambda _: block, page, flags=re.MULTILINE | re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} blocks {begin(name)!r}")
    return page


def block(when: str, rows_of: Iterable[tuple[str, list[Row]]], *, all_rows: bool) -> str:
    """Return a suite's block: when it ran and on what, its counts, and its rows.

    Args:
        rows_of: The rows of each part of the suite, by the part's label; empty for one part.
        all_rows: Show the rows that passed, too.
    """
    parts = [when]
    for label, rows in rows_of:
        title = f"**{label}**: " if label else ""
        kind = ("program" if all_rows else "test") + "s" * (len(rows) != 1)
        said = summary(rows)
        parts.append(f"{title}{len(rows)} {kind}. {said[:1].upper()}{said[1:]}.")
        if text := table(rows, all_rows=all_rows):
            parts.append(text)
    return "\n\n".join(parts)


def totals(rows_of: Iterable[tuple[str, list[Row]]]) -> str:
    """Return the counts of all suites as a table, and as the table's first column their names."""
    columns = (
        (Verdict.PASSED, Verdict.PEER_FAILS),
        (Verdict.OURS_FAILS,),
        (Verdict.BOTH_FAIL,),
        (Verdict.GPU,),
        (Verdict.ABSENT,),
    )
    lines = [f"| suite | {' | '.join(_HEADS)} |", f"| --- |{' --- |' * len(_HEADS)}"]
    for name, rows in rows_of:
        found = counts(rows)
        numbers = [str(sum(found[each] for each in column)) for column in columns]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines)
