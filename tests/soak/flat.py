"""Bounds of counts: the greatest of a first part; what grows above them is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping


class Flat:
    """Bounds of counts.

    Args:
        slack: Returns how much a count may stand above its bound, by its name and the bound.
    """

    def __init__(self, slack: Callable[[str, int], int]) -> None:
        self._slack = slack
        self._bounds: dict[str, int] = {}

    def learn(self, counts: Mapping[str, int]) -> None:
        """Raise the bounds to these counts."""
        for name, count in counts.items():
            self._bounds[name] = max(count, self._bounds.get(name, 0))

    def grown(self, counts: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Return bound and count of what is above its bound, by its name."""
        found = {}
        for name, count in counts.items():
            bound = self._bounds.get(name, 0)
            if count > bound + self._slack(name, bound):
                found[name] = bound, count
        return found


class Changes:
    """Changes of counts by the kinds of operations in which they have occurred."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Counter[str]] = {}
        self._runs: Counter[str] = Counter()

    def note(self, kind: str, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Add the changes of one run of an operation."""
        self._runs[kind] += 1
        found = self._by_kind.setdefault(kind, Counter())
        for name in {*before, *after}:
            found[name] += after.get(name, 0) - before.get(name, 0)

    def of(self, name: str, most: int = 4) -> str:
        """Return the kinds in which a count has grown most, in words."""
        kinds = sorted(self._by_kind, key=lambda kind: -self._by_kind[kind][name])
        grown = [
            f"{kind} {self._by_kind[kind][name]:+} in {self._runs[kind]}"
            for kind in kinds[:most]
            if self._by_kind[kind][name] > 0
        ]
        return ", ".join(grown) or "no kind by itself"


def told(
    grown: Mapping[str, tuple[int, int]], changes: Changes, threads: Iterable[str] = ()
) -> list[str]:
    """Return one line for each count that has grown."""
    lines = []
    for name, (bound, count) in sorted(grown.items()):
        which = f" ({', '.join(sorted(threads))})" if name == "threads" else ""
        lines.append(f"{name}: {count}{which}, at most {bound} before; by kind: {changes.of(name)}")
    return lines
