"""Printed report of the doctor, by rich; plain text if the output is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mpidist.cli.doctor import Report
from mpidist.cli.facts import SHARED_MEMORY, Facts
from mpidist.cli.finding import PROBLEM, WARNING, by_node, size
from mpidist.cli.mpi_facts import MpiFacts
from mpidist.comm.discovery.transports import Transports
from mpidist.comm.mpi import rank_ranges
from mpidist.torch_version import NEWEST, OLDEST

_WIDTH_OF_LOGS = 80
# Rows for nodes: in a log, on a screen.
_MOST_NODES, _NODES_OF_A_SCREEN = 64, 2
# Characters of a row on a screen: two or three lines.
_LONGEST_ON_SCREEN = 150
_STYLES = {PROBLEM: "bold red", WARNING: "yellow"}
_COMPONENTS = {
    "ob1": "its own transports (shared memory, TCP)",
    "ucx": "UCX",
    "cm": "a matching library (libfabric, PSM)",
}


def console(file: TextIO | None = None, is_rank: bool = False) -> Console:
    """Return a console with colours on a terminal, and lines of fixed width elsewhere.

    Args:
        file: Output file; None for standard output.
        is_rank: A launcher has started this process. Open MPI gives ranks a pseudo terminal even if
            its own output is a file.
    """
    file = file or sys.stdout
    if file.isatty() and not is_rank:
        return Console(file=file, highlight=False)
    return Console(
        file=file, highlight=False, width=_WIDTH_OF_LOGS, force_terminal=False, no_color=True
    )


def print_report(report: Report, to: Console) -> None:
    """Print the facts of the job, its nodes, and the findings, each with its remedy first.

    A report without findings fits a terminal of 80 columns and 24 lines: long rows are shortened
    there, but not in a file. Findings are not wrapped, so that commands in remedies can be copied.
    """
    to.print(_facts_table(report, to.is_terminal))
    for finding in report.findings:
        is_of_some = bool(finding.ranks) and len(report.ranks) > 1
        where = f" ({rank_ranges.named(finding.ranks)})" if is_of_some else ""
        style = _STYLES.get(finding.level, "bold")
        lines = [line for line in (finding.remedy, finding.text) if line]
        to.print(f"[{style}]{finding.level}{where}[/]: {escape(lines[0])}", soft_wrap=True)
        for line in lines[1:]:
            to.print(f"    {escape(line)}", soft_wrap=True)
    to.print(_verdict(report))


def _verdict(report: Report) -> str:
    counts = {
        level: sum(finding.level == level for finding in report.findings)
        for level in (PROBLEM, WARNING)
    }
    if counts[PROBLEM]:
        warnings = _counted(counts[WARNING], WARNING)
        return (
            f"[bold red]{_counted(counts[PROBLEM], PROBLEM)}[/], {warnings}: jobs will not run "
            "as they should"
        )
    if counts[WARNING]:
        return f"[yellow]{_counted(counts[WARNING], WARNING)}[/]: jobs run"
    return "[green]everything that was looked at is fine[/]"


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'s' * (number != 1)}"


def _facts_table(report: Report, is_screen: bool) -> Table:
    first = report.ranks[0]
    table = Table.grid(padding=(0, 2))
    table.title = (
        f"mpidist doctor: {_counted(len(report.ranks), 'rank')}, started by {first.launcher}"
    )
    table.title_justify = "left"
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = _rows(first)
    if len(report.ranks) > 1:
        rows += _node_rows(report.ranks, _NODES_OF_A_SCREEN if is_screen else _MOST_NODES)
    for name, text in rows:
        table.add_row(name, escape(_shortened(text) if is_screen else text))
    return table


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_ON_SCREEN:
        return text
    return f"{text[:_LONGEST_ON_SCREEN].rsplit(' ', 1)[0]} ... (all: --json FILE)"


def _rows(facts: Facts) -> list[tuple[str, str]]:
    rows = _mpi_rows(facts.mpi) if facts.mpi is not None else [("MPI", "did not start: see below")]
    oldest, newest = (".".join(map(str, pair)) for pair in (OLDEST, NEWEST))
    tested = {"torch": f" (tested: {oldest} to {newest})"}
    # torch's own version says for which CUDA it is built, and the CuPy wheel's name is its version.
    versions = ", ".join(
        f"{name} {text or 'missing'}".replace("cupy cupy-", "cupy-") + tested.get(name, "")
        for name, text in facts.versions.items()
        if name != "torch's CUDA"
    )
    rows.append(("versions", versions))
    rows += _device_rows(facts)
    shm = (
        f"{size(facts.shm_bytes)}, {size(facts.shm_free_bytes)} free"
        if facts.shm_bytes >= 0
        else "missing"
    )
    shared = {True: "; ranks map each other's memory", False: "; ranks map no memory of others"}
    shares = None if facts.mpi is None else facts.mpi.shares_memory
    mapped = "" if shares is None else shared[shares]
    locked = f"locked memory: {size(facts.memlock_bytes)}"
    rows.append(("memory", f"{SHARED_MEMORY} {shm}; {locked}{mapped}"))
    threads = facts.settings.get("OMP_NUM_THREADS")
    rows.append(
        (
            "cores",
            f"{facts.cores}; torch computes with {_counted(facts.torch_threads, 'thread')}, "
            f"OMP_NUM_THREADS is {threads or 'not set'}",
        )
    )
    rows.append(
        ("settings", " ".join(f"{name}={text}" for name, text in facts.settings.items()) or "none")
    )
    if facts.checks:
        fine = [name for name, text in facts.checks.items() if not text]
        rows.append(("works", "; ".join(fine) or "nothing"))
    return rows


def _mpi_rows(mpi: MpiFacts) -> list[tuple[str, str]]:
    # Open MPI's text goes on with who built it.
    name = mpi.library.split(", package:")[0]
    ulfm = "ULFM is on" if mpi.survives_failures else "ULFM is off"
    return [
        ("MPI", f"{name}; MPI {mpi.standard}; {ulfm}"),
        ("library", mpi.file or "linked into mpi4py"),
        ("launcher", mpi.mpirun or "none found"),
        ("transports", transport_words(mpi.transports)),
    ]


def transport_words(known: Transports) -> str:
    """Return a text for the known transports."""
    words = []
    if known.component:
        words.append(
            f"messages go by {known.component}: "
            f"{_COMPONENTS.get(known.component, 'a component of Open MPI')}"
        )
    if known.device:
        words.append(f"device {known.device}")
    words += [f"{name}={text}" for name, text in known.variables.items()]
    words.append(f"loaded: {', '.join(known.libraries) or 'no network library'}")
    words.append(f"RDMA devices of the node: {', '.join(known.rdma_devices) or 'none'}")
    return "; ".join(words)


def _device_rows(facts: Facts) -> list[tuple[str, str]]:
    driver = (
        f"driver up to CUDA {facts.driver_cuda // 1000}.{facts.driver_cuda % 1000 // 10}"
        if facts.driver_cuda
        else "no driver"
    )
    words = [facts.device.name if facts.device else "none for this rank", driver]
    if facts.mpi is None:
        return [("device", "; ".join(words))]
    mpi, has_one = facts.mpi, facts.device is not None
    words.append(
        f"MPI takes {_awareness('CUDA', mpi.cuda_aware, mpi.cuda_source, has_one)}, "
        f"{_awareness('ROCm', mpi.rocm_aware, mpi.rocm_source, has_one)}"
    )
    rows = [("device", "; ".join(words))]
    if has_one and mpi.operations:
        rows.append(
            ("on device", ", ".join(f"{name} {text}" for name, text in mpi.operations.items()))
        )
    return rows


def _awareness(name: str, is_aware: bool | None, source: str, is_sourced: bool) -> str:
    known = {True: "yes", False: "no", None: "unknown"}[is_aware]
    return f"{name}: {known} ({source})" if is_sourced else f"{name}: {known}"


def _node_rows(ranks: Sequence[Facts], most: int) -> list[tuple[str, str]]:
    """Return a row for each node, with its ranks, their cores and devices."""
    nodes = by_node(ranks)
    rows = []
    for number, members in list(nodes.items())[:most]:
        held = [facts.device for facts in members if facts.device is not None]
        devices = ", ".join(f"cuda:{device.index} {device.uuid}" for device in held) or "cpu"
        cores = {_cores(facts): None for facts in members}
        where = rank_ranges.named([facts.rank for facts in members])
        rows.append(
            (f"node {number}", f"{members[0].host}: {where}; cores {' | '.join(cores)}; {devices}")
        )
    left = len(nodes) - most
    return [*rows, *([("", f"and {_counted(left, 'node')} more")] if left > 0 else [])]


def _cores(facts: Facts) -> str:
    if len(facts.bound_to) == facts.cores:
        return f"all {facts.cores}"
    return rank_ranges.numbers(facts.bound_to)
