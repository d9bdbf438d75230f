"""One finding of the doctor; grouping of ranks by node, and sizes as text; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpidist.cli.facts import Facts

V = TypeVar("V", bound=Hashable)

PROBLEM, WARNING, NOTE = "problem", "warning", "note"


@dataclass(frozen=True)
class Finding:
    """One result of a rule.

    Attributes:
        level: A ``PROBLEM`` stops jobs, a ``WARNING`` makes jobs slow or wrong in some cases, a
            ``NOTE`` is information.
        ranks: Ranks concerned; empty if the finding is about no particular rank.
        text: Description of the finding.
        remedy: Advice; "" without one.
    """

    level: str
    ranks: tuple[int, ...]
    text: str
    remedy: str


def values(ranks: Sequence[Facts], ask: Callable[[Facts], V]) -> dict[V, tuple[int, ...]]:
    """Return the ranks of each distinct value of ``ask``, in the order of their first ranks."""
    by_answer: dict[V, list[int]] = defaultdict(list)
    for facts in ranks:
        by_answer[ask(facts)].append(facts.rank)
    return {answer: tuple(where) for answer, where in by_answer.items()}


def by_node(ranks: Sequence[Facts]) -> dict[int, list[Facts]]:
    """Return the ranks of each node by MPI's node number; without MPI all ranks are on node 0."""
    nodes: dict[int, list[Facts]] = defaultdict(list)
    for facts in ranks:
        nodes[facts.mpi.nodes[facts.rank] if facts.mpi is not None else 0].append(facts)
    return dict(nodes)


def several_on_a_node(ranks: Sequence[Facts]) -> list[list[Facts]]:
    """Return the ranks of each node with several ranks."""
    return [members for members in by_node(ranks).values() if len(members) > 1]


def size(nbytes: int) -> str:
    """Return a text for a number of bytes; -1 means no limit."""
    if nbytes < 0:
        return "unlimited"
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
