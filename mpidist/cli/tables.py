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
from mpidist.cli.finding import PROBLEM, WARNING, ranks_of, size
from mpidist.cli.mpi_facts import MpiFacts
from mpidist.comm.discovery.transports import Transports

_WIDTH_OF_LOGS = 130
_MOST_RANKS = 64
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
    """Print the facts of the job, its ranks, and the findings."""
    first = report.ranks[0]
    to.print(_facts_table(report, first))
    if first.mpi is not None:
        to.print(_rank_table(report.ranks))
    for finding in report.findings:
        where = f" ({ranks_of(finding.ranks)})" if finding.ranks and len(report.ranks) > 1 else ""
        style = _STYLES.get(finding.level, "")
        to.print(
            f"[{style}]{finding.level}[/]" if style else finding.level,
            escape(f"{finding.text}{where}"),
            sep=": ",
        )
        if finding.remedy:
            to.print(f"    {escape(finding.remedy)}")
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


def _facts_table(report: Report, first: Facts) -> Table:
    size_of_job = len(report.ranks)
    table = Table(
        title=f"mpidist doctor: {_counted(size_of_job, 'rank')}, started by {first.launcher}",
        title_justify="left",
        show_header=False,
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(first):
        table.add_row(name, escape(text))
    return table


def _rows(facts: Facts) -> list[tuple[str, str]]:
    rows = _mpi_rows(facts.mpi) if facts.mpi is not None else [("MPI", "did not start: see below")]
    versions = ", ".join(
        f"{name} {text or 'missing'}"
        for name, text in facts.versions.items()
        if text or name != "torch's CUDA"
    )
    rows.append(("versions", versions))
    rows += _device_rows(facts)
    shm = (
        f"{size(facts.shm_bytes)}, {size(facts.shm_free_bytes)} free"
        if facts.shm_bytes >= 0
        else "missing"
    )
    shared = {
        True: "ranks map each other's",
        False: "ranks cannot map each other's",
        None: "not tried with one rank on the node",
    }
    mapped = shared[facts.mpi.shares_memory] if facts.mpi is not None else "not tried"
    rows.append((SHARED_MEMORY, f"{shm} (for MPI's own messages)"))
    rows.append(
        (
            "memory of the node",
            f"{mapped}; gradients lie there, in anonymous files that need nothing of "
            f"{SHARED_MEMORY}",
        )
    )
    rows.append(("locked memory", size(facts.memlock_bytes)))
    threads = facts.settings.get("OMP_NUM_THREADS")
    rows.append(
        (
            "threads",
            f"torch computes with {facts.torch_threads}, OMP_NUM_THREADS is "
            f"{threads or 'not set'}; {facts.cores} cores",
        )
    )
    rows.append(
        ("settings", " ".join(f"{name}={text}" for name, text in facts.settings.items()) or "none")
    )
    if facts.checks:
        fine = [name for name, text in facts.checks.items() if not text]
        rows.append(("works", ", ".join(fine) or "nothing"))
    return rows


def _mpi_rows(mpi: MpiFacts) -> list[tuple[str, str]]:
    abi = {"openmpi": "ABI of Open MPI", "mpich": "ABI of MPICH"}[mpi.abi]
    return [
        ("MPI", f"{mpi.library}; MPI {mpi.standard}, {abi}"),
        ("library", mpi.file or "linked into mpi4py"),
        ("launcher", mpi.mpirun or "none found"),
        ("thread level", mpi.thread_level),
        ("ULFM", "on: a group survives the death of a rank" if mpi.survives_failures else "off"),
        ("transports", transport_words(mpi.transports)),
    ]  # fmt: skip


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
        f"supports up to CUDA {facts.driver_cuda // 1000}.{facts.driver_cuda % 1000 // 10}"
        if facts.driver_cuda
        else "none"
    )
    rows = [
        (
            "CUDA",
            f"{facts.device.name}, driver {driver}"
            if facts.device
            else f"no device for this rank; driver {driver}",
        )
    ]
    if facts.mpi is None:
        return rows
    rows += [
        ("CUDA-aware", _awareness(facts.mpi.cuda_aware, facts.mpi.cuda_source)),
        ("ROCm-aware", _awareness(facts.mpi.rocm_aware, facts.mpi.rocm_source)),
    ]
    if facts.device is not None:
        rows += [(f"  {name}", text) for name, text in facts.mpi.operations.items()]
    return rows


def _awareness(is_aware: bool | None, source: str) -> str:
    return source if is_aware is None else f"{'yes' if is_aware else 'no'} ({source})"


def _rank_table(ranks: Sequence[Facts]) -> Table:
    left = len(ranks) - _MOST_RANKS
    table = Table(
        "rank",
        "node",
        "host",
        "local rank",
        "cores",
        "device",
        caption=f"and {left} ranks more" if left > 0 else None,
    )
    for facts in ranks[:_MOST_RANKS]:
        assert facts.mpi is not None  # because the facts of several ranks were gathered by MPI
        device = f"cuda:{facts.device.index} {facts.device.uuid}" if facts.device else "cpu"
        node = str(facts.mpi.nodes[facts.rank])
        table.add_row(
            str(facts.rank),
            node,
            facts.host,
            f"{facts.mpi.local_rank} of {facts.mpi.local_size}",
            _cores(facts),
            device,
        )
    return table


def _cores(facts: Facts) -> str:
    if len(facts.bound_to) == facts.cores:
        return f"all {facts.cores}"
    return ranks_of(facts.bound_to).split(maxsplit=1)[1]
