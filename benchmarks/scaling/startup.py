"""Costs of a rank before its first step: time, memory, files, threads, messages, by rank count.

Two jobs start at each size: mpi4py alone, and mpidist (its group, then DDP on a small network and
one step). The processes of the second job then leave mpidist's group and start torch's own on Gloo,
over a TCPStore. A figure is the maximum over the ranks. ``ready`` counts from the start of the
interpreter, imports included; Gloo's is its own start plus the same imports.

A communicator in place of MPI_COMM_WORLD counts the calls of mpidist: collectives, constructors of
communicators, and messages. Rank 0 holds torch's store and answers all others, so the messages of
the median rank are shown, too.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness import process_memory
from scaling.counted_communicator import counted, counts_by_kind


def run(options: argparse.Namespace) -> None:
    """Start the jobs of all sizes, or run as a rank of one job."""
    if options.what == "mpi4py":
        _mpi4py(options)
    elif options.what == "mpidist":
        _mpidist(options)
    else:
        _jobs(options)


# One job.


def _age_s() -> float:
    """Return the seconds since the kernel started this process (Linux, to 10 ms)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _mpi4py(options: argparse.Namespace) -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    own = {"ready_s": _age_s(), **_held()}
    _write(options, MPI.COMM_WORLD.allgather(own), MPI.COMM_WORLD.Get_rank(), {})


def _mpidist(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import mpidist.comm
    from mpidist.comm.mpi import library
    from mpidist.ddp import DistributedDataParallel

    torch.set_num_threads(1)
    own: dict[str, float] = {
        f"imported_{name}": value for name, value in {"s": _age_s(), **_held()}.items()
    }
    counts: collections.Counter[str] = collections.Counter()
    library.MPI.COMM_WORLD = counted(library.MPI.COMM_WORLD, counts)
    own["mpi_s"] = _age_s()
    group = mpidist.comm.init()
    dist.init_process_group("mpidist")
    group.barrier()
    own |= {
        "ready_s": _age_s(),
        "cpu_s": time.process_time(),
        **_held(),
        **counts_by_kind(counts, "group"),
    }
    net = DistributedDataParallel(torch.nn.Linear(256, 256))
    net(torch.zeros(1, 256)).sum().backward()
    own |= {
        f"ddp_{name}": value for name, value in {"s": _age_s(), **_held()}.items()
    } | counts_by_kind(counts, "ddp")
    about = {"nodes": len(set(group._comm.nodes)), "cores": len(os.sched_getaffinity(0))}
    host, port = group.all_gather_object(_free_address(about["nodes"]))[0]
    rank, size = group.rank, group.size
    dist.destroy_process_group()
    group.barrier()
    before, start = _held(), time.perf_counter()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=options.limit_s),
    )
    dist.barrier()
    after = _held()
    gloo_s = time.perf_counter() - start
    own |= {"gloo_s": gloo_s, "gloo_ready_s": own["imported_s"] + gloo_s}
    own |= {f"gloo_{name}": after[name] - before[name] for name in after}
    dist.destroy_process_group()
    _write(options, group.all_gather_object(own), rank, about)


def _free_address(nodes: int) -> tuple[str, int]:
    with socket.socket() as one:
        one.bind(("", 0))
        port = one.getsockname()[1]
    return ("127.0.0.1" if nodes == 1 else socket.gethostbyname(socket.gethostname())), port


def _held() -> dict[str, float]:
    """Return this process's RSS and PSS in MiB, open files and threads (Linux)."""
    rss_mib, pss_mib = process_memory.resident_and_shared_mib()
    return {
        "rss_mib": rss_mib,
        "pss_mib": pss_mib,
        # One file is the folder itself.
        "files": len(os.listdir("/proc/self/fd")) - 1,
        "threads": len(os.listdir("/proc/self/task")),
    }


def _write(
    options: argparse.Namespace,
    all_own: Sequence[Mapping[str, float]],
    rank: int,
    about: Mapping[str, Any],
) -> None:
    if rank:
        return
    most = {name: max(own[name] for own in all_own) for name in all_own[0]}
    middle = {name: statistics.median_high(own[name] for own in all_own) for name in all_own[0]}
    record = {
        "benchmark": "scaling-startup",
        "what": options.what,
        "ranks": len(all_own),
        **about,
        "most": most,
        "median": middle,
    }
    path = options.output / f"startup-{options.what}-{len(all_own)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(all_own)} ranks, {options.what}: {path.name}", flush=True)


# Jobs in sequence.


def _jobs(options: argparse.Namespace) -> None:
    from harness import environment, report
    from scaling import jobs as scaling_jobs

    rows: list[dict[str, Any]] = []
    missed: dict[str, str] = {}

    from mpidist import progress_bar

    for ranks in progress_bar.track(options.jobs, "jobs", 0):
        found = {}
        for what in ("mpi4py", "mpidist"):
            passed = ["startup", "--what", what, "--limit-s", str(options.limit_s)]
            written, why = scaling_jobs.run(
                scaling_jobs.plain(ranks, passed, options.launcher), options.limit_s
            )
            if why is None:
                found[what] = written[0]
            else:
                missed[f"{ranks} ranks, {what}"] = why
                print(f"{ranks} ranks, {what}: {why}", flush=True)
        if len(found) == 2:
            rows.append(row_of(found["mpi4py"], found["mpidist"]))
    if not rows:
        raise SystemExit("no size had both jobs end well: nothing to report")
    judged = {
        name: growth([(row["ranks"], row[name]) for row in rows])
        for name in rows[0]
        if name not in ("ranks", "oversubscribed")
    }
    about = _about(environment)
    record = {
        "benchmark": "scaling-startup",
        "environment": about,
        "jobs": rows,
        "growth": judged,
        "jobs_without_result": missed,
    }
    path = options.output / "scaling-startup.json"
    report.write_json(record, path)
    print(text_of(rows, judged), f"\nwritten to {options.output.name}: {path.name}", flush=True)
    if missed:
        raise SystemExit(1)


def _about(environment: Any) -> dict[str, Any]:
    """Describe the machine; this process becomes an MPI job of one rank after all others."""
    from mpi4py import MPI

    return dict(environment.describe(MPI.COMM_SELF))


def row_of(alone: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return one size's row: seconds, MiB beyond the imports, and counts per rank."""
    most = ours["most"]
    return {
        "ranks": ours["ranks"],
        "oversubscribed": ours["ranks"] > ours["cores"] * ours["nodes"],
        "mpi4py_ready_s": alone["most"]["ready_s"],
        "imported_s": most["imported_s"],
        "ready_s": most["ready_s"],
        "own_start_s": most["ready_s"] - most["imported_s"],
        "gloo_ready_s": most["gloo_ready_s"],
        "gloo_start_s": most["gloo_s"],
        "cpu_s": most["cpu_s"],
        "rss_mib": most["rss_mib"] - most["imported_rss_mib"],
        "pss_mib": most["pss_mib"] - most["imported_pss_mib"],
        "gloo_rss_mib": most["gloo_rss_mib"],
        "files": most["files"],
        "mpi4py_files": alone["most"]["files"],
        "gloo_files_added": most["gloo_files"],
        "threads": most["threads"],
        "ddp_rss_mib": most["ddp_rss_mib"] - most["imported_rss_mib"],
        "group_collectives": most["group_collectives"],
        "group_makers": most["group_makers"],
        "group_messages": ours["median"]["group_messages"],
        "group_messages_of_rank_0": most["group_messages"],
        "ddp_collectives": most["ddp_collectives"] - most["group_collectives"],
        "ddp_messages": most["ddp_messages"] - most["group_messages"],
        # By arithmetic, up to DDP's first step: a collective or a new communicator costs a rank
        # log2 W messages.
        "sent_by_formula": (most["ddp_collectives"] + most["ddp_makers"])
        * math.ceil(math.log2(ours["ranks"]))
        + ours["median"]["ddp_messages"],
    }


def growth(values: Sequence[tuple[int, float]]) -> str:
    """Return a figure's growth over the jobs: ``flat``, ``logarithmic`` or ``faster``.

    Flat is within a quarter (or within 1 unit of a count); logarithmic is at most log2 of the
    ranks, with the same margin.
    """
    (few, first), (many, last) = min(values), max(values)
    if few == many or last <= 1.25 * first or last - first <= 1:
        return "flat"
    return (
        "logarithmic"
        if last <= 1.25 * first * math.log2(many) / math.log2(max(few, 2))
        else "faster"
    )


def text_of(rows: Sequence[Mapping[str, Any]], judged: Mapping[str, str]) -> str:
    """Return the table: a row per figure, a column per size."""
    from harness import tables

    headers = (
        "of the rank that has most",
        *(f"{row['ranks']}{'*' if row['oversubscribed'] else ''} ranks" for row in rows),
        "grows",
    )
    lines = [[name, *(f"{row[name]:.3g}" for row in rows), judged[name]] for name in judged]
    return tables.text(lines, headers) + "\n*: more ranks than cores, which take turns"
