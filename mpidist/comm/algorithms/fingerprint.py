"""Before a collective, compare what each rank is about to do (``MPIDIST_DEBUG=1``); a difference raises on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from mpidist.comm.mpi import byte_strings
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.errors import DisagreementError

_DIGEST_BYTES = 16
REFUSAL = "arguments refused"  # the fact under which a rank tells that it could not even start


def describe(operation: str, sequence: int, facts: Sequence[tuple[str, Any]]) -> str:
    """Write the facts on which all ranks must agree as one line: ``name=value; …``.

    A fact named ``tensor`` or ``tensors`` stands for shape, dtype and kind of device; whoever
    collects facts need not spell them out each time.
    """
    told: list[tuple[str, Any]] = [("operation", operation), ("sequence", sequence)]
    for name, value in facts:
        if name == "tensor":
            told += [
                ("shape", tuple(value.shape)),
                ("dtype", value.dtype),
                ("device", value.device.type),
            ]
        elif name == "tensors":
            told += [
                ("shapes", [tuple(t.shape) for t in value]),
                ("dtypes", [t.dtype for t in value]),
            ]
            told += [("devices", [t.device.type for t in value])]
        else:
            told.append((name, value))
    return "; ".join(f"{name}={value}" for name, value in told)


def differences(lines: Sequence[str]) -> str:
    """Say which ranks hold what, fact by fact; empty if all agree."""
    tables = [dict(item.split("=", 1) for item in line.split("; ")) for line in lines]
    if any(REFUSAL in table for table in tables):  # such a rank had no other facts to tell
        tables = [{REFUSAL: table[REFUSAL]} if REFUSAL in table else {} for table in tables]
    told = []
    for name in dict.fromkeys(key for table in tables for key in table):
        holders: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            holders.setdefault(table.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            told.append(
                f"{name}: "
                + ", ".join(
                    f"{value} on rank{'s' if len(r) > 1 else ''} {_runs(r)}"
                    for value, r in holders.items()
                )
            )
    return "; ".join(told)


def check(comm: Communicator, where: str, line: str) -> None:
    """Compare ``line`` with all other ranks'.

    Collective: over the group, before each collective; one all-gather of 16 bytes when all agree.

    Raises:
        DisagreementError: On all ranks alike, naming who differs in what.
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
    """Compare what rank i means to send to rank j with what j expects from i.

    Raises:
        DisagreementError: On all ranks alike, naming each pair that differs.
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
    return [told.decode(errors="replace") for told in byte_strings.gathered(comm.mpi, line)]


def _runs(ranks: Sequence[int]) -> str:
    return (
        ", ".join(map(str, ranks))
        if len(ranks) <= 8
        else f"{', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    )
