"""Fingerprints of collectives, compared by all ranks before each one (``MPIDIST_DEBUG=1``)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from mpidist.comm.mpi import byte_strings, rank_ranges
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.errors import DisagreementError

_DIGEST_BYTES = 16
REFUSAL = "arguments refused"  # the fact of a rank whose argument check failed


def describe(operation: str, sequence: int, facts: Sequence[tuple[str, Any]]) -> str:
    """Return the facts on which all ranks must agree, as one line: ``name=value; …``.

    A fact named ``tensor`` or ``tensors`` is written as shape, dtype and kind of device.
    """
    items: list[tuple[str, object]] = [("operation", operation), ("sequence", sequence)]
    for name, value in facts:
        if name == "tensor":
            items += [
                ("shape", tuple(value.shape)),
                ("dtype", value.dtype),
                ("device", value.device.type),
            ]
        elif name == "tensors":
            items += [
                ("shapes", [tuple(t.shape) for t in value]),
                ("dtypes", [t.dtype for t in value]),
            ]
            items += [("devices", [t.device.type for t in value])]
        else:
            items.append((name, value))
    return "; ".join(f"{name}={value}" for name, value in items)


def differences(lines: Sequence[str]) -> str:
    """Return which ranks have which value of each fact that differs; empty if all agree."""
    tables = [dict(item.split("=", 1) for item in line.split("; ")) for line in lines]
    # A rank whose argument check failed has no other facts.
    if any(REFUSAL in table for table in tables):
        tables = [{REFUSAL: table[REFUSAL]} if REFUSAL in table else {} for table in tables]
    # The arguments of different operations have nothing in common that could be compared.
    elif len({table["operation"] for table in tables}) > 1:
        tables = [{key: table[key] for key in ("operation", "sequence")} for table in tables]
    differing = []
    for name in dict.fromkeys(key for table in tables for key in table):
        holders: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            holders.setdefault(table.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            differing.append(
                f"{name}: "
                + ", ".join(f"{value} on {rank_ranges.named(r)}" for value, r in holders.items())
            )
    return "; ".join(differing)


def check(comm: Communicator, where: str, line: str) -> None:
    """Compare ``line`` over all ranks.

    Collective: over the group, before each collective; one all-gather of 16 bytes when all agree.

    Raises:
        DisagreementError: On all ranks, naming the ranks and facts that differ.
    """
    mine = hashlib.blake2b(line.encode(), digest_size=_DIGEST_BYTES).digest()
    all_digests = bytearray(_DIGEST_BYTES * comm.size)
    comm.mpi.Allgather((mine, _DIGEST_BYTES, MPI.BYTE), (all_digests, _DIGEST_BYTES, MPI.BYTE))
    if all_digests == mine * comm.size:
        return
    lines = _all_lines(comm, line.encode())
    raise DisagreementError(f"{where}: ranks disagree. {differences(lines)}")


def check_matrix(
    comm: Communicator, where: str, sends: Sequence[int], receives: Sequence[int], what: str
) -> None:
    """Compare the counts that rank i sends to rank j with those that j expects from i.

    Collective: over the group.

    Raises:
        DisagreementError: On all ranks, naming each pair that differs.
    """
    rows = [
        [int(number) for number in line.split(",")]
        for line in _all_lines(comm, ",".join(map(str, (*sends, *receives))).encode())
    ]
    size = comm.size
    wrong = [
        f"rank {i} sends {rows[i][j]} {what} to rank {j}, which expects {rows[j][size + i]}"
        for i in range(size)
        for j in range(size)
        if rows[i][j] != rows[j][size + i]
    ]
    if wrong:
        raise DisagreementError(f"{where}: ranks disagree. {'; '.join(wrong)}")


def _all_lines(comm: Communicator, line: bytes) -> list[str]:
    return [text.decode(errors="replace") for text in byte_strings.gathered(comm.mpi, line)]
