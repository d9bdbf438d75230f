"""Tuning tables: the fastest all-reduce and ring chunk at each size, cached.

``python -m mpidist.tune`` under the job's launcher measures a table for device memory; before that,
built-in defaults are used. The cache is the user's.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist import cache
from mpidist.comm.mpi import byte_strings
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import library_name

LIBRARY, RING, STAGED = ALGORITHMS = ("library", "ring", "staged")

# Measured chunk sizes of the ring, by label. Short chunks overlap addition and transfer; each costs
# some 45 us of host time, and a switch between ranks that share a GPU.
RINGS = {f"{RING} ({mib} MiB)": mib << 20 for mib in (1, 4, 16, 64)}

_KIND = "all-reduce"
_TERMINAL = 80  # columns


@dataclass(frozen=True)
class Table:
    """A ranking of algorithms by size.

    Attributes:
        rows: (bytes, algorithms from fastest to slowest), by ascending bytes.
        source: Origin of the ranking.
        chunks: For each row the bytes of the ring's chunks, None where not measured; empty if
            never measured.
    """

    rows: tuple[tuple[int, tuple[str, ...]], ...]
    source: str
    chunks: tuple[int | None, ...] = ()

    def choose(self, nbytes: int, able: Sequence[str]) -> str:
        """Return the fastest of the algorithms ``able``, in the row whose size ratio is nearest 1.

        Raises:
            ValueError: The table has none of them.
        """
        _, ranking = self.rows[self._row(nbytes)]
        for name in ranking:
            if name in able:
                return name
        raise ValueError(f"the tuning table ranks {ranking}; able are {list(able)}")

    def chunk_bytes(self, nbytes: int) -> int | None:
        """Return the bytes of the ring's chunks for a size; None for the ring's default."""
        return self.chunks[self._row(nbytes)] if self.chunks else None

    def lines(self) -> list[str]:
        """Return a line of text for each row."""
        chunks = self.chunks or (None,) * len(self.rows)
        names: dict[int | None, str] = {chunk: name for name, chunk in RINGS.items()}
        return [
            f"{nbytes:>11} B: "
            f"{', '.join(names.get(chunk, name) if name == RING else name for name in ranking)}"
            for (nbytes, ranking), chunk in zip(self.rows, chunks, strict=True)
        ]

    def _row(self, nbytes: int) -> int:
        """Return the index of the row whose size has the ratio nearest 1."""
        ratios = [max(size, nbytes, 1) / max(min(size, nbytes), 1) for size, _ in self.rows]
        return ratios.index(min(ratios))


def line_of(head: str, entries: Sequence[str]) -> str:
    """Return a head and entries as text that fits a terminal, broken between entries only."""
    # Spaces within an entry must not break.
    kept = "  ".join(entry.replace(" ", "\0") for entry in entries)
    indent = " " * (len(head) + 2)
    lines = textwrap.wrap(kept, _TERMINAL - len(indent), break_on_hyphens=False) or [""]
    return f"{head}  " + f"\n{indent}".join(lines).replace("\0", " ")


# Measured with two ranks on one H100 (docs/decisions/0006): Open MPI's all-reduce has the lowest
# latency, and copies long tensors through pageable memory.
UNMEASURED = Table(
    ((16 << 10, (LIBRARY, STAGED, RING)), (16 << 20, (RING, STAGED, LIBRARY))), "unmeasured"
)


def table_of(seconds: Mapping[int, Mapping[str, float]], source: str) -> Table:
    """Return the table for measured times.

    Args:
        seconds: Time of each algorithm at each size in bytes, of the ring with each of its chunks
            (``RINGS``). Algorithms without a time are ranked last.
        source: Origin of the times.
    """
    rows, chunks = [], []
    for nbytes, measured in sorted(seconds.items()):
        times = {name: measured[name] for name in ALGORITHMS if name in measured}
        ring = min(
            RINGS.keys() & measured, key=lambda name: (measured[name], RINGS[name]), default=None
        )
        if ring is not None:
            times[RING] = measured[ring]
        missing = [name for name in ALGORITHMS if name not in times]
        rows.append((nbytes, (*sorted(times, key=times.__getitem__), *missing)))
        chunks.append(None if ring is None else RINGS[ring])
    return Table(tuple(rows), source, tuple(chunks) if any(chunks) else ())


def rings_for(nbytes: int, size: int) -> dict[str, int]:
    """Return the ``RINGS`` that differ at a size: chunks longer than a shard are equal.

    Args:
        nbytes: Size of the tensor.
        size: W.
    """
    shard_bytes = -(-nbytes // size)
    shorter = {name: chunk for name, chunk in RINGS.items() if chunk < shard_bytes}
    # Chunks of a shard's size or longer all send the shard whole; one of them is measured.
    return dict(list(RINGS.items())[: len(shorter) + 1])


def key(comm: Communicator, device: torch.device) -> dict[str, object]:
    """Return the cache key of a measured table."""
    return {
        "library": library_name(),
        "device": (torch.cuda.get_device_name(device) if device.type == "cuda" else device.type),
        "ranks": comm.size,
        "nodes": len(set(comm.nodes)),
    }


def store(comm: Communicator, device: torch.device, table: Table) -> bool:
    """Write a table to the cache; return whether that succeeded."""
    return cache.store(_KIND, key(comm, device), _as_plain(table))


def agreed_table(comm: Communicator, device: torch.device) -> Table:
    """Return the table that all ranks of a group use: rank 0's.

    Collective: over ``comm``, the first time for a device type; later calls are local.
    """
    held = comm.tuning_tables.get(device.type)
    if held is None:
        text = b""
        if comm.rank == 0:
            text = json.dumps(_as_plain(_from_plain(cache.load(_KIND, key(comm, device))))).encode()
        chosen = byte_strings.gathered(comm.mpi, text)[0]
        held = comm.tuning_tables[device.type] = _from_plain(json.loads(chosen))
    return held


def _as_plain(table: Table) -> dict[str, object]:
    rows = [[nbytes, list(ranking)] for nbytes, ranking in table.rows]
    return {"rows": rows, "source": table.source, "chunks": list(table.chunks)}


def _from_plain(held: Any) -> Table:
    # The cache may hold another version's table.
    try:
        rows = tuple((int(nbytes), tuple(ranking)) for nbytes, ranking in held["rows"])
        if rows and all(sorted(ranking) == sorted(ALGORITHMS) for _, ranking in rows):
            return Table(rows, str(held["source"]), _chunks(held.get("chunks", ()), len(rows)))
    except (TypeError, ValueError, LookupError, OverflowError):
        pass
    return UNMEASURED


def _chunks(held: Any, count: int) -> tuple[int | None, ...]:
    """Return the chunks of a cached table; none if its version measured none."""
    chunks = tuple(None if chunk is None else int(chunk) for chunk in held)
    are_possible = len(chunks) == count and all(chunk is None or chunk > 0 for chunk in chunks)
    return chunks if are_possible else ()
