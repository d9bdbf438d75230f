"""A latency–bandwidth model of collectives: times by ranks and bytes, fitted to measured points, checked on others. Pure.

The time of an operation of N bytes on n nodes of p ranks each, W = n·p, is a sum of terms that its
algorithm has, each times a parameter that is not negative:

- the call itself, once, in a node; between nodes what a protocol for long messages adds, once.
  Short messages between nodes have no such term: all of their time counts with the nodes, and long
  ones have the same latency;
- a message's latency, as often as messages follow each other: log2 p times in a node, log2 n times
  between nodes;
- bytes that a rank copies and adds up: log2 p · N for short messages (recursive doubling),
  2·(p-1)/p · N for long ones (reduce-scatter and all-gather; half of that for one of the two
  alone);
- bytes that cross a node's link, which its p ranks share: p · 2·(n-1)/n · N, over the link's rate.

Short and long messages go by different algorithms and protocols, so a fit has up to three ranges of
N with parameters of their own; where one range ends is chosen on the fitted points. More ranks than
cores take turns: terms of computing count ``share`` times, the ranks of a core, and each of the
log2 W messages that follow each other waits for ``share - 1`` others to have their turn. That is
explicit in a ``Point``; ``share`` is 1, and turns cost nothing, in every prediction for other
machines.

Sources: Hockney (1994) for latency and bandwidth; Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), for the terms of the algorithms.

Letters: W ranks, n nodes, p ranks of a node, N bytes (of the whole: ``scaling_measure`` says of
what in which operation).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

TRAINED_RANKS = (2, 4)
TERMS = ("call", "node latency", "node bytes", "network latency", "network bytes", "turns")
_RANGES = 3
_LEAST_POINTS = 3  # of a range
_WORTH_A_RANGE = 0.9  # of the mean error without it
# Bytes that pass a rank or a link, of those that a reduce-scatter and an all-gather together move.
_PASSES = {
    "all_reduce": 2.0,
    "average": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "broadcast": 2.0,
    "barrier": 0.0,
}


@dataclass(frozen=True)
class Point:
    """One case; ``seconds`` is its measured time, and 0 where only a prediction is wanted."""

    operation: str
    nodes: int
    ranks_per_node: int
    nbytes: int
    rate_gbit_s: float = math.inf  # of the link between nodes
    share: float = 1.0  # ranks that take turns on one core
    seconds: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def terms(point: Point, is_short: bool) -> tuple[float, ...]:
    """Return how often each of ``TERMS`` counts; all 0 for one rank.

    Units: the bytes in a node in bytes, those of the network in seconds at the link's rate, the
    rest are counts.
    """
    n, p, nbytes = point.nodes, point.ranks_per_node, point.nbytes
    if point.ranks == 1:
        return (0.0,) * len(TERMS)
    passes = _PASSES[point.operation]
    steps_node, steps_net = math.log2(p), math.log2(n)
    in_node = max(steps_node if is_short else 0.0, passes * (p - 1) / p)
    # On each node's way to the others what comes is added up as well, or copied.
    if n > 1:
        in_node += passes * (n - 1) / n
    over_link = p * passes * (n - 1) / n * nbytes * 8 / (point.rate_gbit_s * 1e9)
    call = point.share if n == 1 else 0.0 if is_short else 1.0
    turns = (point.share - 1) * math.log2(point.ranks)
    return (
        call,
        point.share * steps_node,
        point.share * in_node * nbytes,
        steps_net,
        over_link,
        turns,
    )


@dataclass(frozen=True)
class Fit:
    """Parameters of one operation on one class of links.

    Attributes:
        ends: For each range the largest N that it holds for; the last is infinite.
        parameters: For each range one of each of ``TERMS``: seconds; those of bytes a second a
            byte, and of the link's own time.
    """

    operation: str
    ends: tuple[float, ...]
    parameters: tuple[tuple[float, ...], ...]

    def seconds(self, point: Point) -> float:
        """Return the time of a case; 0 for one rank. It never falls as N grows."""
        if point.ranks == 1:
            return 0.0
        longest = 0.0
        for place, end in enumerate(self.ends):
            inside = point.nbytes <= end
            nbytes = point.nbytes if inside else int(end)
            row = terms(_sized(point, nbytes), place == 0)
            longest = max(longest, float(np.dot(row, self.parameters[place])))
            if inside:
                break
        return longest


def fit(points: Iterable[Point]) -> Fit:
    """Fit one operation's parameters by non-negative least squares on the relative error.

    Raises:
        ValueError: No point of more than one rank, several operations, or a time that is not
            positive.
    """
    known = [point for point in points if point.ranks > 1]
    if len({point.operation for point in known}) != 1:
        raise ValueError("a fit takes points of one operation, at least one of more than one rank")
    if any(not point.seconds > 0 for point in known):
        raise ValueError("a fit takes points with a measured time above 0")
    sizes = sorted({point.nbytes for point in known})
    best: tuple[float, Fit] | None = None
    for count in range(_RANGES):
        cuts = itertools.combinations(sizes[:-1], count)
        made = [
            found
            for cut in cuts
            if (found := _fitted(known, (*map(float, cut), math.inf))) is not None
        ]
        least = min(made, key=lambda found: found[0], default=None)
        # One range more follows the noise as well: it must be worth its parameters.
        if least is not None and (best is None or least[0] < _WORTH_A_RANGE * best[0]):
            best = least
    assert best is not None  # one range takes all points
    return best[1]


def _fitted(points: Sequence[Point], ends: tuple[float, ...]) -> tuple[float, Fit] | None:
    parameters: list[tuple[float, ...]] = []
    first = -1.0
    latency = TERMS.index("network latency")
    for place, end in enumerate(ends):
        inside = [point for point in points if first < point.nbytes <= end]
        if len(ends) > 1 and len(inside) < _LEAST_POINTS:
            return None
        rows = np.array(
            [[term / point.seconds for term in terms(point, place == 0)] for point in inside]
        )
        wanted = np.ones(len(inside))
        if place:
            # Few numbers of nodes tell little of what grows with them: the short messages' latency
            # holds for the long ones.
            wanted = np.maximum(wanted - rows[:, latency] * parameters[0][latency], 0.0)
            rows[:, latency] = 0.0
        # Columns of bytes and of seconds differ by ten orders of magnitude.
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
        found, _ = nnls(rows / scale, wanted)
        own = [float(value) for value in found / scale]
        if place:
            own[latency] = parameters[0][latency]
        parameters.append(tuple(own))
        first = end
    made = Fit(points[0].operation, ends, tuple(parameters))
    return float(np.mean([abs(relative_error(made, point)) for point in points])), made


def relative_error(made: Fit, point: Point) -> float:
    """Return by how much a fit's time is above (or below) the measured one, over the measured one."""
    return made.seconds(point) / point.seconds - 1


def is_trained(point: Point, sizes: Sequence[int], ranks: Sequence[int] = TRAINED_RANKS) -> bool:
    """Say whether a point is fitted to, not held out: every second of ``sizes``, at some numbers of ranks.

    The largest size is fitted to: what is held out then lies between sizes that are known.
    """
    ordered = sorted(set(sizes))
    return point.ranks in ranks and (len(ordered) - 1 - ordered.index(point.nbytes)) % 2 == 0


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Return the points to fit to, and those that are held out; points of one rank are neither."""
    known = [point for point in points if point.ranks > 1]
    sizes = [point.nbytes for point in known]
    trained = [point for point in known if is_trained(point, sizes)]
    chosen = set(map(id, trained))
    return trained, [point for point in known if id(point) not in chosen]


def validate(points: Sequence[Point]) -> tuple[dict[str, Fit], list[dict[str, Any]]]:
    """Fit each operation to its part of the points; return the fits, and an entry with its error for each held-out point."""
    fits: dict[str, Fit] = {}
    errors: list[dict[str, Any]] = []
    for operation, group in _grouped(points, lambda point: point.operation).items():
        trained, held_out = split(group)
        if not trained:
            continue
        fits[operation] = fit(trained)
        for point in held_out:
            entry = {
                **asdict(point),
                "ranks": point.ranks,
                "predicted_seconds": fits[operation].seconds(point),
            }
            errors.append({**entry, "relative_error": relative_error(fits[operation], point)})
    return fits, errors


def median_error(errors: Iterable[dict[str, Any]]) -> float | None:
    """Return the median of the absolute relative errors; None without any."""
    found = [abs(entry["relative_error"]) for entry in errors]
    return float(np.median(found)) if found else None


def rate_of(link: str) -> float:
    """Return Gbit/s of a link named as tc does (``100mbit``); infinite for the memory of a node (an empty name).

    Raises:
        ValueError: Another name.
    """
    if not link:
        return math.inf
    for unit, scale in (("gbit", 1.0), ("mbit", 1e-3)):
        if link.endswith(unit):
            return float(link.removesuffix(unit)) * scale
    raise ValueError(f"a link is named by its rate, 25gbit or 100mbit; got {link!r}")


def _sized(point: Point, nbytes: int) -> Point:
    return Point(
        point.operation, point.nodes, point.ranks_per_node, nbytes, point.rate_gbit_s, point.share
    )


def _grouped(points: Iterable[Point], key: Callable[[Point], str]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return found
