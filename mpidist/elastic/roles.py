"""Roles after deaths (pure): the spare that takes a lost rank, and whether the job goes on.

A process of the job is a rank of the training or a spare. The number of ranks stays as long as
there are spares; then the ranks that live close up, in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mpidist.comm.mpi import rank_ranges
from mpidist.errors import LaunchError

VARIABLE = "MPIDIST_SPARES"
SPARE, DEAD = -1, -2


@dataclass(frozen=True)
class Limits:
    """Limits of a job.

    Attributes:
        min_ranks: Least number of ranks.
        max_failures: Most deaths; None for no limit.
    """

    min_ranks: int = 1
    max_failures: int | None = None


@dataclass(frozen=True)
class Plan:
    """Roles of the processes after some have died.

    Attributes:
        roles: Rank of each process of the job, by its number at the start; ``SPARE`` for a spare,
            ``DEAD`` for one that has died.
        lost: Former ranks of those that have died since.
        filled: Those of them whose place a spare takes.
        refusal: Reason why the job cannot go on; "" if it can.
    """

    roles: tuple[int, ...]
    lost: tuple[int, ...]
    filled: tuple[int, ...]
    refusal: str

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(role >= 0 for role in self.roles)

    @property
    def spares(self) -> int:
        """Return the number of spares that are left."""
        return self.roles.count(SPARE)

    def described(self) -> str:
        """Return what happens to the lost ranks, for the job's output."""
        words = []
        if self.filled:
            one = len(self.filled) == 1
            words.append(
                f"{'a spare takes' if one else 'spares take'} the place of "
                f"{rank_ranges.named(self.filled)}"
            )
        if len(self.filled) < len(self.lost):
            words.append(f"{self.size} ranks go on")
        return ", ".join(words)


def number_of_spares(environ: Mapping[str, str]) -> int:
    """Return the number of spares among the processes of the job: the last ones.

    Raises:
        LaunchError: The variable is no number.
    """
    text = environ.get(VARIABLE, "0")
    if not text.isdecimal():
        raise LaunchError(f"{VARIABLE} is the number of spare processes of the job; got {text!r}")
    return int(text)


def at_start(processes: int, spares: int) -> tuple[int, ...]:
    """Return the roles of a job's processes at its start; the last ones are the spares."""
    ranks = processes - spares
    return (*range(ranks), *[SPARE] * spares)


def plan(former: Sequence[int], living: Collection[int], limits: Limits) -> Plan:
    """Return the roles of the processes that live.

    Args:
        former: Roles before.
        living: Processes, by their numbers at the start.
        limits: Of the job.
    """
    roles = [role if process in living else DEAD for process, role in enumerate(former)]
    lost = sorted({role for role in former if role >= 0} - set(roles))
    spares = [process for process, role in enumerate(roles) if role == SPARE]
    filled = lost[: len(spares)]
    for process, role in zip(spares, filled, strict=False):
        roles[process] = role
    # The ranks close up where no spare is left.
    places = {role: place for place, role in enumerate(sorted(r for r in roles if r >= 0))}
    closed_up = [places.get(role, role) for role in roles]
    refusal = _refusal(len(former), len(living), len(places), limits)
    return Plan(tuple(closed_up), tuple(lost), tuple(filled), refusal)


def _refusal(processes: int, living: int, ranks: int, limits: Limits) -> str:
    deaths = processes - living
    if ranks < limits.min_ranks:
        return (
            f"{deaths} of its {processes} processes have died, and {ranks} of at least "
            f"{limits.min_ranks} ranks are left (min_ranks)"
        )
    if limits.max_failures is not None and deaths > limits.max_failures:
        return (
            f"{deaths} of its {processes} processes have died, more than the "
            f"{limits.max_failures} of max_failures"
        )
    return ""
