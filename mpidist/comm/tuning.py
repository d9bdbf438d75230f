"""Tuning tables: the fastest all-reduce at each size, measured and kept in the user's cache folder.

One table is for device memory, one for host memory between nodes that have several ranks each.

``python -m mpidist.tune`` under the job's launcher measures it; until then rules hold that nobody has measured on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist import cache
from mpidist.comm.communicator import Communicator
from mpidist.comm.library import MPI, library_name

LIBRARY, RING, STAGED, LEVELS = "library", "ring", "staged", "levels"
ALGORITHMS = (LIBRARY, RING, STAGED)  # of device memory
HOST_ALGORITHMS = (LIBRARY, LEVELS)
HOST = "host"  # the name of host memory in the place of a device's

_KIND = "all-reduce"


@dataclass(frozen=True)
class Table:
    """Sizes and what was the fastest there.

    Attributes:
        rows: (bytes, algorithms from the fastest on), by ascending bytes.
        source: Who says so.
    """

    rows: tuple[tuple[int, tuple[str, ...]], ...]
    source: str

    def choose(self, nbytes: int, able: Sequence[str]) -> str:
        """Return the first algorithm of those ``able`` in the row whose size is nearest, as a ratio.

        Raises:
            ValueError: None is.
        """
        _, ranking = min(self.rows, key=lambda row: max(row[0], nbytes, 1) / max(min(row[0], nbytes), 1))
        for name in ranking:
            if name in able:
                return name
        raise ValueError(f"the tuning table ranks {ranking}; able are {list(able)}")


# The library starts soonest; around the ring transfer and addition overlap; through the host is what always works.
UNMEASURED = Table(((16 << 10, (LIBRARY, RING, STAGED)), (16 << 20, (RING, LIBRARY, STAGED))), "unmeasured")


# MPI libraries know networks and nodes that we do not; bits must not change from run to run with a guess.
UNMEASURED_HOST = Table(((64 << 10, HOST_ALGORITHMS),), "unmeasured")


def table_of(seconds: Mapping[int, Mapping[str, float]], source: str, algorithms: Sequence[str] = ALGORITHMS) -> Table:
    """Return the table for measured times.

    Args:
        seconds: For each size in bytes, what each algorithm took; those that cannot are missing, and come last.
        algorithms: All there are.
    """
    rows = []
    for nbytes, times in sorted(seconds.items()):
        missing = [name for name in algorithms if name not in times]
        rows.append((nbytes, (*sorted(times, key=times.__getitem__), *missing)))
    return Table(tuple(rows), source)


def key(comm: Communicator, device: torch.device | None) -> dict[str, Any]:
    """Return what a measured table depends on; None stands for host memory."""
    kind = _kind(device)
    return {
        "library": library_name(),
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        "ranks": comm.size,
        "nodes": len(set(comm.nodes)),
    }


def store(comm: Communicator, device: torch.device | None, table: Table) -> bool:
    """Keep a table for later jobs; say whether that could be done."""
    return cache.store(_KIND, key(comm, device), _as_plain(table))


def agreed_table(comm: Communicator, device: torch.device | None) -> Table:
    """Return the table that all ranks of a group use: rank 0's.

    Collective: over ``comm``, the first time for a device type; later calls are local.
    """
    kind = _kind(device)
    held = comm.tuning_tables.get(kind)
    if held is None:
        text = b""
        if comm.rank == 0:
            text = json.dumps(_as_plain(_from_plain(cache.load(_KIND, key(comm, device)), kind))).encode()
        length = bytearray(len(text).to_bytes(8, "little"))
        comm.mpi.Bcast((length, 8, MPI.BYTE), 0)
        space = bytearray(text) if comm.rank == 0 else bytearray(int.from_bytes(length, "little"))
        comm.mpi.Bcast((space, len(space), MPI.BYTE), 0)
        held = comm.tuning_tables[kind] = _from_plain(json.loads(bytes(space)), kind)
    return held


def _kind(device: torch.device | None) -> str:
    return HOST if device is None else device.type


def _as_plain(table: Table) -> dict[str, Any]:
    return {"rows": [[nbytes, list(ranking)] for nbytes, ranking in table.rows], "source": table.source}


def _from_plain(held: Any, kind: str) -> Table:
    algorithms, unmeasured = (HOST_ALGORITHMS, UNMEASURED_HOST) if kind == HOST else (ALGORITHMS, UNMEASURED)
    # What is in the cache may be another version's.
    try:
        rows = tuple((int(nbytes), tuple(ranking)) for nbytes, ranking in held["rows"])
        if rows and all(sorted(ranking) == sorted(algorithms) for _, ranking in rows):
            return Table(rows, str(held["source"]))
    except (TypeError, ValueError, LookupError):
        pass
    return unmeasured
