"""Printed figures of a timeline, by rich; plain text if the output is no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mpidist.cli.finding import size
from mpidist.trace.summary import Bandwidth, RankFigures, Summary, Wait

_MOST_RANKS = 32  # rows; of more ranks the latest


def print_summary(summary: Summary, to: Console) -> None:
    """Print the figures of a trace, what is wrong first."""
    for line in summary.stragglers:
        to.print(f"[bold red]straggler[/]: {escape(line)}", soft_wrap=True)
    for line in summary.notes:
        to.print(f"[yellow]note[/]: {escape(line)}", soft_wrap=True)
    to.print(_ranks(summary.ranks))
    if summary.bandwidths:
        to.print(_bandwidths(summary.bandwidths))
    if summary.waits:
        to.print(_waits(summary.waits))


def _ranks(ranks: Sequence[RankFigures]) -> Table:
    shown = sorted(ranks, key=lambda one: -one.late_us)[:_MOST_RANKS]
    title = (
        f"ranks ({len(shown)} of {len(ranks)}, the latest)" if len(shown) < len(ranks) else "ranks"
    )
    table = _table(title, "rank", "host", "collectives", "last", "late", "waited", "communicates")
    for one in sorted(shown):
        share = one.exposed_us / one.recorded_us if one.recorded_us else 0.0
        last = f"{one.last / one.collectives:.0%}" if one.collectives else "-"
        table.add_row(
            str(one.rank), escape(one.host), str(one.collectives), last, duration(one.late_us),
            duration(one.waited_us), f"{share:.0%}",
        )  # fmt: skip
    return table


def _bandwidths(bandwidths: Sequence[Bandwidth]) -> Table:
    table = _table("operations", "operation", "up to", "count", "time", "GB/s", "tuned")
    for one in bandwidths:
        table.add_row(
            escape(one.operation), size(one.size_bytes), str(one.transfers), duration(one.time_us),
            f"{one.gigabytes_per_s:.3g}", one.tuned,
        )  # fmt: skip
    return table


def _waits(waits: Sequence[Wait]) -> Table:
    table = _table("longest waits", "rank", "waits", "for rank", "operation", "group", "at")
    for one in waits:
        number = f" {one.sequence}" if one.sequence else ""
        table.add_row(
            str(one.rank), duration(one.seconds * 1e6), "any" if one.peer < 0 else str(one.peer),
            escape(one.operation) + number, escape(one.group), f"{one.at_us / 1e6:.3f} s",
        )  # fmt: skip
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        is_text = name in ("host", "operation", "group", "tuned")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def duration(microseconds: float) -> str:
    """Return a time with its unit."""
    if abs(microseconds) >= 1e6:
        return f"{microseconds / 1e6:.3g} s"
    return f"{microseconds / 1e3:.3g} ms" if abs(microseconds) >= 1e3 else f"{microseconds:.3g} us"
