"""Printed report on a job, by rich: findings, ranks, last operations, stacks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mpidist.comm.mpi import rank_ranges
from mpidist.comm.watchdog import last_operations, thread_places
from mpidist.comm.watchdog.thread_stacks import Stack
from mpidist.reports import findings, operations
from mpidist.reports.findings import Finding
from mpidist.reports.job import ELSEWHERE, ENDED, RUNS, STOPPED, Job
from mpidist.reports.job_files import Found

# Ranks that stand one by one, and rows and stacks of a larger job.
_MOST = 8
_MOST_THREADS = 8  # of one rank
_WIDTH = 40  # of a program
_STYLES = {STOPPED: "bold red", ENDED: "red", RUNS: "green", ELSEWHERE: "dim"}


def print_report(job: Job, found: Sequence[Finding], last: int, to: Console) -> None:
    """Print what is known of a job.

    Args:
        found: What keeps it.
        last: Number of the last operations.
    """
    to.print(_safe(_title(job)), style="bold", soft_wrap=True)
    for reason in job.left_out[:_MOST]:
        to.print(f"[yellow]left out[/]: {_safe(reason)}", soft_wrap=True)
    for finding in found:
        to.print(f"[bold red]found[/]: {_safe(finding.text)}")
        for line in finding.details:
            to.print(f"    {_safe(line)}")
        to.print(f"    [green]do[/]: {_safe(finding.remedy)}")
    if not found:
        to.print("[green]nothing keeps it[/], as far as its files say")
    to.print()
    to.print(_ranks_table(job))
    if last:
        to.print()
        to.print(_operations_table(job, last))
    to.print()
    for line in _stack_lines(job):
        to.print(line, soft_wrap=True)
    to.print(f"files: {_safe(str(job.first.path.parent))}", soft_wrap=True, style="dim")


def print_jobs(others: Sequence[Found], to: Console) -> None:
    """Print the other jobs that have files on this node, if there are any."""
    if not others:
        return
    table = _table("", "")
    to.print("other jobs of this node: mpidist report JOB", style="bold")
    for job in others[:_MOST]:
        began = time.strftime("%d %b %H:%M:%S", time.localtime(job.first.started_wall_ns / 1e9))
        ranks = f"{job.first.size} rank{'s' * (job.first.size != 1)}"
        table.add_row(_safe(job.name), _safe(f"{ranks}, {began}, {_short(job.first.program)}"))
    to.print(table)


def _short(program: str) -> str:
    """Return a command line without the program's folder, and without its end if it is long."""
    name, blank, arguments = program.partition(" ")
    text = name.rpartition("/")[2] + blank + arguments
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


def _safe(text: str) -> str:
    """Return text of a file as rich prints it: no markup, no characters that move the cursor."""
    return escape("".join(each if each.isprintable() else "?" for each in text))


def _title(job: Job) -> str:
    first, hosts = job.first, {each.host for each in job.recordings.values()}
    missing = (
        f", without files of {rank_ranges.named(job.unknown)} (on other nodes: --folder)"
        if job.unknown
        else ""
    )
    state = "runs" if job.is_alive else "has ended here"
    if set(job.states.values()) == {ELSEWHERE}:
        state = "of other nodes"
    nodes = f" on {len(hosts)} nodes" if len(hosts) > 1 else f" on {first.host}"
    ranks = f"{first.size} rank{'s' * (first.size != 1)}{_places(job)}"
    return f"mpidist report: job {first.job}, {ranks}{nodes}, {state}{missing}: {first.program}"


def _places(job: Job) -> str:
    """Return the ranks among all processes of the job where they are not those of the world."""
    places = [int(each.path.name.rpartition("-")[2]) for each in job.recordings.values()]
    if places == list(job.recordings):
        return ""
    return f" ({rank_ranges.named(places)} of all)"


def _table(*columns: str) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, overflow="fold", header_style="bold")
    return table


def _ranks_table(job: Job) -> Table:
    table = _table("rank", "process", "is in")
    shared: dict[object, list[int]] = {}
    for rank in job.recordings:
        inside = tuple(map(last_operations.described, job.innermost(rank)))
        key = rank if len(job.recordings) <= _MOST else (job.states.get(rank), inside)
        shared.setdefault(key, []).append(rank)
    # Sorting is stable: the state of the fewest ranks is what the others wait for.
    ordered = sorted(shared.values(), key=len)
    for ranks in ordered[:_MOST]:
        rank, state = ranks[0], job.states.get(ranks[0], ELSEWHERE)
        style = _STYLES[state]
        process = f"{job.recordings[rank].pid} {state}" if len(ranks) == 1 else state
        table.add_row(
            rank_ranges.numbers(ranks),
            f"[{style}]{_safe(process)}[/]",
            _safe(findings.words(job, rank)),
        )
    if hidden := [rank for ranks in ordered[_MOST:] for rank in ranks]:
        table.add_row(rank_ranges.numbers(hidden), "", f"in {len(ordered) - _MOST} other states")
    return table


def _operations_table(job: Job, last: int) -> Table:
    table = _table("begin", "rank", "last operations, in one order", "took")
    for row in operations.rows(job, last):
        seconds, ns = divmod(row.begin_ns, 10**9)
        clock = time.strftime("%H:%M:%S", time.localtime(seconds))
        table.add_row(
            f"{clock}.{ns // 1000:06d}",
            rank_ranges.numbers(row.entries),
            _safe(row.text),
            _safe(row.ending),
        )
    return table


def _stack_lines(job: Job) -> Iterator[str]:
    """Yield a line for each thread of the ranks with stacks; ranks at the same lines share them."""
    shared: dict[object, list[int]] = {}
    for rank, stacks in job.stacks.items():
        shared.setdefault(tuple(_threads(stacks)), []).append(rank)
    for threads, ranks in sorted(shared.items(), key=lambda item: len(item[1]))[:_MOST]:
        yield f"[bold]threads of {rank_ranges.named(ranks)}[/]"
        assert isinstance(threads, tuple)
        yield from (f"  {_safe(line)}" for line in threads)
    if job.stacks:
        first = job.recordings[min(job.stacks)]
        yield f"[dim]whole stacks: {_safe(str(first.path.parent))}/stacks-*[/]"


def _threads(stacks: Sequence[Stack]) -> list[str]:
    """Return a line for each thread with a line of the program, the main thread's first."""
    users = [
        stack
        for stack in stacks
        if stack.lines and (stack.name == "MainThread" or not thread_places.is_idle(stack.lines))
    ]
    users.sort(key=lambda stack: (stack.name != "MainThread", stack.name))
    return [
        f"{stack.name or 'a thread'}: {thread_places.described(stack.lines)}"
        for stack in users[:_MOST_THREADS]
    ]
