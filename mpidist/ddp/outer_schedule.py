"""Schedule of outer steps: fragments of a module's parameters, and the steps that begin averages.

All functions are pure. Letters: H inner steps from one average of a fragment to its next; F
fragments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mpidist.ddp.buckets.settings import require_int


@dataclass(frozen=True)
class OuterSchedule:
    """Inner steps behind which averages begin and end; steps count from 1.

    Raises:
        TypeError: A number is no int.
        ValueError: ``every`` or ``fragments`` is below 1, there are more fragments than inner
            steps, or ``overlap`` is negative or not below ``every``.
    """

    # H.
    every: int
    # F.
    fragments: int = 1
    # Inner steps from the beginning of an average to its merge.
    overlap: int = 0

    def __post_init__(self) -> None:
        require_int("every", self.every, least=1)
        require_int("fragments", self.fragments, least=1)
        require_int("overlap", self.overlap, least=0)
        if self.fragments > self.every:
            raise ValueError(
                f"fragments must be at most every, so that one average begins behind a step; got "
                f"{self.fragments} fragments every {self.every} steps"
            )
        if self.overlap >= self.every:
            raise ValueError(
                "overlap must be below every, so that a fragment is merged before its next average "
                f"begins; got overlap {self.overlap} and every {self.every}"
            )

    def begins(self, step: int) -> bool:
        """Return whether an average begins behind an inner step.

        Fragment f of F begins behind steps of (f + 1) · H / F, rounded down, and multiples of H
        more: the last one at H, and with one fragment nothing else.
        """
        place = (step - 1) % self.every + 1
        return place in {(f + 1) * self.every // self.fragments for f in range(self.fragments)}


def even_runs(numels: Sequence[int], parts: int) -> list[list[int]]:
    """Return the places of a list as ``parts`` runs of about as many elements each.

    Args:
        numels: Number of elements of each parameter.

    Raises:
        ValueError: There are fewer parameters than parts.
    """
    if parts > len(numels):
        raise ValueError(
            f"fragments must be at most the number of parameters that require a gradient, "
            f"{len(numels)}; got {parts}"
        )
    total = sum(numels)
    middles = [end - numel / 2 for end, numel in zip(accumulate(numels), numels, strict=True)]
    runs: list[list[int]] = [[] for _ in range(parts)]
    for place, middle in enumerate(middles):
        wanted = int(middle * parts / total) if total else 0
        # Neither past a run that would stay empty, nor so late that a later run would.
        present = next((i for i in reversed(range(parts)) if runs[i]), -1)
        least, most = max(present, place - len(numels) + parts), present + 1
        runs[min(max(wanted, least, 0), most, parts - 1)].append(place)
    return runs


def runs_of(members: Sequence[Iterable[object]], known: Sequence[object]) -> list[list[int]]:
    """Return the places in ``known`` of each fragment's members, compared by identity.

    Members that are not known, such as frozen parameters, are left out.

    Raises:
        ValueError: A known one is in no fragment or in several, or a fragment has none.
    """
    place_of = {id(one): place for place, one in enumerate(known)}
    runs = [
        list(dict.fromkeys(place_of[id(one)] for one in fragment if id(one) in place_of))
        for fragment in members
    ]
    if not all(runs) or sorted(place for run in runs for place in run) != list(range(len(known))):
        raise ValueError(
            "fragments must hold each parameter that requires a gradient in exactly one of the "
            "modules, and each module one or more"
        )
    return runs
