"""Calibration of the simulator by all-reduces that were measured on links of this machine.

A record of ``bench_scaling.py sweep --links`` has all-reduces of MPICH between two namespaces over
a limited link, of one rank each and of two. The shortest ones of two ranks give the simulated
cable's latency; its rate is the link's. All others are compared with two simulations: a C program
(``calibration.c``) under SMPI, whose collectives are MPICH's as SimGrid has them, and the messages
of ``schedules`` replayed.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import tables
from harness.goals import format_bytes
from replay import judgement, schedules, simulator
from replay.networks import Network
from scaling import cost_model

# Bytes up to which a message is one packet.
_ONE_PACKET = 1024
# The part of a short message's time that is processor time of each end.
_OVERHEAD_SHARE = 0.25
_SOURCE = Path(__file__).with_name("calibration.c")
_LIMIT_S = 120.0
_SIMULATED = ("program_seconds", "replayed_seconds")


def run(measured: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Simulate the all-reduces of measured jobs on links; return both times of each.

    Raises:
        SystemExit: SimGrid or its compiler are missing, or no job has a link.
        RuntimeError: A simulation failed.
    """
    jobs = [one for one in measured if one["nodes"] == 2]
    pairs = {one["link"]: reduced(one) for one in jobs if one["ranks"] == 2}
    if not pairs:
        raise SystemExit("the record has no job of two ranks on a link: bench_scaling.py sweep")
    links, rows = [], []
    with tempfile.TemporaryDirectory() as name:
        program = compiled(Path(name) / "program")
        for link, pair in pairs.items():
            network, messages = parameters(pair, cost_model.rate_of(link))
            links.append(
                {
                    "link": link,
                    "latency_us": network.latency_s * 1e6,
                    "overhead_us": messages.overhead_s * 1e6,
                }
            )
            measure = judgement.replayed(messages)
            for job in jobs:
                if job["link"] != link:
                    continue
                times, ranks = reduced(job), job["ranks"]
                words = [str(program), *map(str, times)]
                printed = simulator.program_output(network, ranks, words, messages)
                by_smpi = times_of(printed)
                for nbytes, seconds in times.items():
                    algorithm = schedules.chosen("mpich", nbytes, ranks)
                    replayed = judgement.all_reduce_s(network, ranks, nbytes, algorithm, measure)
                    rows.append(
                        {
                            "link": link,
                            "ranks": ranks,
                            "nbytes": nbytes,
                            "measured_seconds": seconds,
                            "program_seconds": by_smpi[nbytes],
                            "replayed_seconds": replayed,
                        }
                    )
    return {
        "benchmark": "replay-calibration",
        "simgrid": simulator.version(),
        "links": links,
        "results": rows,
    }


def reduced(job: Mapping[str, Any]) -> dict[int, float]:
    """Return the seconds of a job's all-reduces by bytes."""
    return {
        one["nbytes"]: one["us"] / 1e6
        for one in job["collectives"]
        if one["operation"] == "all_reduce"
    }


def parameters(pair: Mapping[int, float], rate_gbit_s: float) -> tuple[Network, simulator.Messages]:
    """Return the simulated cable and costs of a message.

    Args:
        pair: Seconds of all-reduces of two ranks, which are one message each way where they are
            short.
        rate_gbit_s: The link's own rate.
    """
    short = statistics.median(s for nbytes, s in pair.items() if nbytes <= _ONE_PACKET)
    overhead = _OVERHEAD_SHARE * short
    return Network("pair", 2, rate_gbit_s, short - 2 * overhead), simulator.Messages(overhead)


def compiled(target: Path) -> Path:
    """Compile the program by ``smpicc``; return its path.

    Raises:
        SystemExit: The compiler is missing or fails.
    """
    found = shutil.which("smpicc")
    if found is None:
        raise SystemExit(simulator.MISSING)
    command = [found, "-O2", str(_SOURCE), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise SystemExit(f"smpicc failed: {done.stderr.strip()[-300:]}")
    return target


def times_of(output: str) -> dict[int, float]:
    """Return the seconds of an all-reduce by bytes, as the program printed them."""
    found = {}
    for line in output.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "all_reduce":
            found[int(words[1])] = float(words[2])
    return found


def text_of(record: Mapping[str, Any]) -> str:
    """Return the table of all cases, and the median errors by link and ranks."""
    rows = [
        (
            one["link"],
            one["ranks"],
            format_bytes(one["nbytes"]),
            *(f"{1e6 * one[key]:.0f}" for key in ("measured_seconds", *_SIMULATED)),
            f"{one['replayed_seconds'] / one['measured_seconds'] - 1:+.0%}",
        )
        for one in record["results"]
    ]
    headers = ("link", "ranks", "bytes", "measured us", "SMPI us", "replayed us", "error")
    medians = [
        (link, ranks, *(f"{error:.0%}" for error in errors))
        for link, ranks, *errors in errors_of(record["results"])
    ]
    title = ("link", "ranks", "SMPI", "replayed", "replayed, from 32 KiB")
    return (
        f"{tables.text(rows, headers, keys=3)}\n\nMedian error\n"
        f"{tables.text(medians, title, keys=2)}"
    )


def errors_of(results: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return link, ranks, and the median errors of the program, the replay, and its long ones."""
    found = []
    for link, ranks in dict.fromkeys((one["link"], one["ranks"]) for one in results):
        own = [one for one in results if (one["link"], one["ranks"]) == (link, ranks)]
        long = [one for one in own if one["nbytes"] >= 32 << 10]
        parts = ((_SIMULATED[0], own), (_SIMULATED[1], own), (_SIMULATED[1], long or own))
        found.append((link, ranks, *(_error(some, key) for key, some in parts)))
    return found


def _error(entries: Sequence[Mapping[str, Any]], key: str) -> float:
    return judgement.median_error(
        [{"relative_error": one[key] / one["measured_seconds"] - 1} for one in entries]
    )
