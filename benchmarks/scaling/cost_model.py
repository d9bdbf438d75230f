"""Latency-bandwidth model of collectives, fitted to measured points and checked on others. Pure.

The time of an operation of N bytes on n nodes of p ranks each, W = n·p, is a sum of the algorithm's
terms, each multiplied by a non-negative parameter:

- the call itself, once, within a node; between nodes the overhead of a protocol for long messages,
  once. Short messages between nodes have no such term: all of their time grows with the nodes, and
  long ones have the same latency;
- the latency of a message, once per consecutive message: log2 p times within a node; between nodes
  log2 n times for short messages, and for long ones log2 n times in the reduce-scatter and again in
  the all-gather;
- bytes that a rank copies and adds: log2 p · N for short messages (recursive doubling),
  2·(p-1)/p · N for long ones (reduce-scatter and all-gather; half of that for only one of them);
- bytes on a node's link, which its p ranks share: p · 2·(n-1)/n · N, over the link's rate.

MPI uses different algorithms and protocols for short and long messages, so a fit has up to three
ranges of N, each with its own parameters; the fitted points determine the ends of the ranges. More
ranks than cores take turns: computing terms count ``share`` times (ranks per core), and each of the
log2 W consecutive messages waits for the turns of ``share - 1`` other ranks. ``Point`` states its
share explicitly; predictions for other machines use ``share`` 1, without turns.

What the terms miss, the switch of a protocol or a cache that overflows, is kept at the fitted sizes
of each layout, as the measured time over that of the terms. Another layout between the fitted rates
has the ratios of the nearest ones; the growth with ranks and nodes is that of the terms.

Algorithms with other numbers of messages, a ring's 2·(n-1), are those of ``exchanges``.

Sources: Hockney (1994) for latency and bandwidth; Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), for the terms of the algorithms.

Letters: W ranks, n nodes, p ranks per node, N bytes (``scaling_measure`` defines N per operation).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

_Key = TypeVar("_Key")

TRAINED_RANKS = (2, 4)
TERMS = ("call", "node latency", "node bytes", "network latency", "network bytes", "turns")
_RANGES = 3
_LEAST_POINTS = 3  # per range
# Largest mean error, relative to the fit with fewer ranges, that justifies another range.
_WORTH_A_RANGE = 0.9
# Above all links; below them, and below all times by the terms.
_MOST_GBIT_S, _LEAST_PLACE, _LEAST_S = 1e6, 1e-3, 1e-12
# Share of the bytes per rank or link, relative to a reduce-scatter plus an all-gather.
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
    """One case; ``seconds`` is the measured time, or 0 for a prediction."""

    operation: str
    nodes: int
    ranks_per_node: int
    nbytes: int
    # Rate of the link between nodes.
    rate_gbit_s: float = math.inf
    # Ranks per core.
    share: float = 1.0
    seconds: float = 0.0
    # Slowdown of the machine's computing during the measurement, relative to that of the fitted
    # points: of other work, and of the clock.
    pace: float = 1.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Times(Protocol):
    """Predicted times of collectives."""

    def seconds(self, point: Point) -> float:
        """Return the time of a case; 0 for one rank."""
        ...


def terms(point: Point, is_short: bool) -> tuple[float, ...]:
    """Return the factor of each of ``TERMS``; all 0 for one rank.

    Units: bytes within a node are bytes; bytes on the network are seconds at the link's rate; all
    others are counts.
    """
    n, p, nbytes = point.nodes, point.ranks_per_node, point.nbytes
    if point.ranks == 1:
        return (0.0,) * len(TERMS)
    passes = _PASSES[point.operation]
    steps_node, steps_net = math.log2(p), math.log2(n)
    if not is_short:
        steps_net *= max(passes, 1.0)
    in_node = max(steps_node if is_short else 0.0, passes * (p - 1) / p)
    # Data for other nodes is also added or copied on each node.
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
class Ratios:
    """Measured time over that of the terms in one layout: logarithms at rising N."""

    ranks_per_node: int
    ranks: int
    rate_gbit_s: float
    sizes: tuple[int, ...]
    logs: tuple[float, ...]


@dataclass(frozen=True)
class Fit:
    """Parameters of one operation on one class of links.

    Attributes:
        ends: Per range the largest N of the range; the last is infinite.
        parameters: Per range one for each of ``TERMS``: seconds, seconds per byte, or a factor of
            the link's own time.
        ratios: Of the fitted layouts; without any, the terms alone count.
    """

    operation: str
    ends: tuple[float, ...]
    parameters: tuple[tuple[float, ...], ...]
    ratios: tuple[Ratios, ...] = ()

    def seconds(self, point: Point) -> float:
        """Return the time of a case; 0 for one rank. The time never falls as N grows."""
        if point.ranks == 1:
            return 0.0
        if not self.ratios:
            return point.pace * self._of_terms(point)
        # Between the fitted sizes the time is straight over N, both logarithmic.
        sizes, logs = _at_fitted_sizes(self, replace(point, nbytes=0, seconds=0.0, pace=1.0))
        nearest = min(max(point.nbytes, sizes[0]), sizes[-1])
        seconds = _straight(nearest, sizes, logs)
        if point.nbytes != nearest:
            at_end = max(self._of_terms(_sized(point, nearest)), _LEAST_S)
            return point.pace * self._of_terms(point) / at_end * math.exp(seconds)
        return point.pace * math.exp(seconds)

    def at_fitted_size(self, point: Point, nbytes: int) -> float:
        """Return the time of a case with another N, by the ratios of the nearest layouts."""
        seconds = max(self._of_terms(_sized(point, nbytes)), _LEAST_S)
        alike = [one for one in self.ratios if one.ranks_per_node == point.ranks_per_node]
        known = alike or self.ratios
        rates = [one.rate_gbit_s for one in known]
        # Outside the fitted rates the ratios are no guide.
        if not min(rates) <= point.rate_gbit_s <= max(rates):
            return seconds
        by_ranks: dict[int, list[Ratios]] = {}
        for one in sorted(known, key=lambda one: (one.ranks, one.rate_gbit_s)):
            by_ranks.setdefault(one.ranks, []).append(one)
        logs = []
        for own in by_ranks.values():
            # Within a node the rate is infinite.
            rates = [min(one.rate_gbit_s, _MOST_GBIT_S) for one in own]
            here = [_straight(nbytes, one.sizes, one.logs) for one in own]
            logs.append(_straight(min(point.rate_gbit_s, _MOST_GBIT_S), rates, here))
        # Beyond the fitted ranks neither is what one number of ranks does.
        is_inside = point.ranks <= max(by_ranks)
        ratio = _straight(point.ranks, list(by_ranks), logs) if is_inside else float(np.mean(logs))
        return seconds * math.exp(ratio)

    def _of_terms(self, point: Point) -> float:
        longest = 0.0
        for place, end in enumerate(self.ends):
            inside = point.nbytes <= end
            nbytes = point.nbytes if inside else int(end)
            row = terms(_sized(point, nbytes), place == 0)
            longest = max(longest, float(np.dot(row, self.parameters[place])))
            if inside:
                break
        return longest


# Many sizes are asked for in each layout.
@functools.lru_cache(maxsize=1 << 10)
def _at_fitted_sizes(made: Fit, at: Point) -> tuple[Sequence[int], Sequence[float]]:
    """Return the sizes of all ratios, and the logarithms of a layout's times, which never fall."""
    sizes = sorted({nbytes for one in made.ratios for nbytes in one.sizes})
    known = [made.at_fitted_size(at, nbytes) for nbytes in sizes]
    return sizes, np.log(np.maximum.accumulate(known)).tolist()


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
        candidates = [
            found
            for cut in cuts
            if (found := _fitted(known, (*map(float, cut), math.inf))) is not None
        ]
        least = min(candidates, key=lambda found: found[0], default=None)
        # Another range also fits noise, so it must reduce the error by enough.
        if least is not None and (best is None or least[0] < _WORTH_A_RANGE * best[0]):
            best = least
    # One range accepts all points.
    assert best is not None
    return replace(best[1], ratios=_ratios(best[1], known))


def _ratios(terms_alone: Fit, points: Sequence[Point]) -> tuple[Ratios, ...]:
    """Return what the terms miss at the fitted points."""
    found = []
    for (p, ranks, rate), own in _grouped(
        points, lambda point: (point.ranks_per_node, point.ranks, point.rate_gbit_s)
    ).items():
        own.sort(key=lambda point: point.nbytes)
        logs = [
            math.log(point.seconds / max(terms_alone.seconds(point), _LEAST_S)) for point in own
        ]
        found.append(Ratios(p, ranks, rate, tuple(point.nbytes for point in own), tuple(logs)))
    return tuple(found)


def _straight(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at a place over the logarithm of the places; beyond them, that of an end."""
    # N may be 0.
    logs = np.log(np.maximum(places, _LEAST_PLACE))
    return float(np.interp(math.log(max(at, _LEAST_PLACE)), logs, values))


def _fitted(points: Sequence[Point], ends: tuple[float, ...]) -> tuple[float, Fit] | None:
    # Here, because predictions need no scipy.
    from scipy.optimize import nnls

    parameters: list[tuple[float, ...]] = []
    first = -1.0
    latency = TERMS.index("network latency")
    for place, end in enumerate(ends):
        inside = [point for point in points if first < point.nbytes <= end]
        if len(ends) > 1 and len(inside) < _LEAST_POINTS:
            return None
        rows = np.array(
            [
                [point.pace * term / point.seconds for term in terms(point, place == 0)]
                for point in inside
            ]
        )
        wanted = np.ones(len(inside))
        if place:
            # With few numbers of nodes the growth with nodes is uncertain: long messages use the
            # latency of the short ones.
            wanted = np.maximum(wanted - rows[:, latency] * parameters[0][latency], 0.0)
            rows[:, latency] = 0.0
        # Columns in bytes and in seconds differ by ten orders of magnitude.
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
        found, _ = nnls(rows / scale, wanted)
        own = [float(value) for value in found / scale]
        if place:
            own[latency] = parameters[0][latency]
        parameters.append(tuple(own))
        first = end
    candidates = Fit(points[0].operation, ends, tuple(parameters))
    return float(np.mean([abs(relative_error(candidates, point)) for point in points])), candidates


def relative_error(times: Times, point: Point) -> float:
    """Return the error of a predicted time relative to the measured time, with its sign."""
    return times.seconds(point) / point.seconds - 1


def is_trained(point: Point, sizes: Sequence[int], ranks: Sequence[int] = TRAINED_RANKS) -> bool:
    """Return whether a point is fitted (not held out): every second size, at ``ranks``.

    The largest size is fitted, so that held-out sizes lie between fitted ones.
    """
    ordered = sorted(set(sizes))
    return point.ranks in ranks and (len(ordered) - 1 - ordered.index(point.nbytes)) % 2 == 0


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Return the fitted and the held-out points, without those of one rank."""
    known = [point for point in points if point.ranks > 1]
    sizes = [point.nbytes for point in known]
    trained = [point for point in known if is_trained(point, sizes)]
    chosen = set(map(id, trained))
    return trained, [point for point in known if id(point) not in chosen]


def validate(points: Sequence[Point]) -> tuple[dict[str, Fit], list[dict[str, Any]]]:
    """Fit each operation; return the fits, and each held-out point with its error."""
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
    """Return the median of the absolute relative errors; None without errors."""
    found = [abs(entry["relative_error"]) for entry in errors]
    return float(np.median(found)) if found else None


def rate_of(link: str) -> float:
    """Return the Gbit/s of a link named as in tc (``100mbit``); infinite for "", a node's memory.

    Raises:
        ValueError: The name is unknown.
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


def _grouped(points: Iterable[Point], key: Callable[[Point], _Key]) -> dict[_Key, list[Point]]:
    found: dict[_Key, list[Point]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return found
