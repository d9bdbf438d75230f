"""Judgement of the closed-form model by simulated networks: errors at sizes that nobody measured.

On each network the all-reduces of 2, 4 and 8 nodes are simulated, as a user would measure them
there with a small job. The model (``scaling.cost_model``) is fitted to these, and then asked for 64
and more nodes: single all-reduces, and whole steps with each hook. The same are simulated, and what
the model misses is its error: of the terms alone, as the simulated network has no noise.

Letters: W ranks, one on each node; N bytes.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replay import schedules, simulator, traces
from replay.networks import Network
from scaling import cost_model, model, steps
from scaling.cost_model import Fit, Point

FITTED_RANKS, JUDGED_RANKS = (2, 4, 8), (64, 128, 256, 512)
SIZES = tuple(1 << power for power in range(10, 27, 2))
HOOKS = ("none", "bf16", "powersgd-4")
# The printed time has whole microseconds.
_LEAST_S = 2e-4
_MOST_REPEATS = 40
Measure = Callable[[Network, int, Iterable[Any]], float]


@dataclass(frozen=True)
class Job:
    """Training to judge: a network's buckets and computing, an MPI library, hooks' costs."""

    name: str
    compute_s: float
    buckets: Sequence[steps.Bucket]
    costs: Mapping[str, steps.HookCost]


def all_reduce_s(
    network: Network, ranks: int, nbytes: int, algorithm: str, measure: Measure
) -> float:
    """Return the simulated seconds of an all-reduce, as the mean of several where it is short."""
    once = measure(network, ranks, traces.all_reduce(nbytes, ranks, algorithm))
    if once >= _LEAST_S:
        return once
    repeats = min(_MOST_REPEATS, int(_LEAST_S / max(once, 1e-6)) + 2)
    return measure(network, ranks, traces.all_reduce(nbytes, ranks, algorithm, repeats)) / repeats


def points(
    network: Network, ranks: Iterable[int], sizes: Iterable[int], library: str, measure: Measure
) -> list[Point]:
    """Return simulated all-reduces by an MPI library's choice of algorithms."""
    found = []
    for count in ranks:
        for nbytes in sizes:
            algorithm = schedules.chosen(library, nbytes, count)
            seconds = all_reduce_s(network, count, nbytes, algorithm, measure)
            found.append(
                Point("all_reduce", count, 1, nbytes, network.rate_gbit_s, seconds=seconds)
            )
    return found


def fitted(network: Network, library: str, measure: Measure) -> Fit:
    """Return the model of a network's all-reduces, fitted to 2, 4 and 8 nodes."""
    return cost_model.fit(points(network, FITTED_RANKS, SIZES, library, measure))


def judged_collectives(
    network: Network, library: str, fit: Fit, ranks: Iterable[int], measure: Measure
) -> list[dict[str, Any]]:
    """Return an entry for each simulated all-reduce, with the model's time and its error."""
    return [
        {
            "network": network.kind,
            "library": library,
            "ranks": point.nodes,
            "nbytes": point.nbytes,
            "simulated_seconds": point.seconds,
            "predicted_seconds": fit.seconds(replace(point, seconds=0.0)),
            "relative_error": cost_model.relative_error(fit, point),
        }
        for point in points(network, ranks, SIZES, library, measure)
    ]


def judged_step(
    job: Job, network: Network, library: str, fit: Fit, ranks: int, hook: str, measure: Measure
) -> dict[str, Any]:
    """Return one simulated step beside the predicted one, with the prediction's errors."""
    plan = traces.plan_of(job.compute_s, job.buckets, hook, job.costs)
    choose = functools.partial(schedules.chosen, library, ranks=ranks)
    simulated = measure(network, ranks, traces.step(plan, ranks, choose))
    at = steps.Layout(ranks, 1, network.rate_gbit_s)
    said = steps.step(job.compute_s, job.buckets, hook, at, {"all_reduce": fit}, job.costs)
    exposed = simulated - job.compute_s
    return {
        "network": network.kind,
        "rate_gbit_s": network.rate_gbit_s,
        "library": library,
        "job": job.name,
        "ranks": ranks,
        "hook": hook,
        "compute_seconds": job.compute_s,
        "simulated_seconds": simulated,
        "predicted_seconds": said.seconds,
        "relative_error": said.seconds / simulated - 1,
        "simulated_exposed_seconds": exposed,
        "predicted_exposed_seconds": said.exposed_s,
        "exposed_error": said.exposed_s / exposed - 1,
    }


def choices(judged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest and the predicted hook of each case, and what the choice costs."""
    case = ("network", "rate_gbit_s", "library", "job", "ranks")
    return model.choices_by(case, judged, "simulated_seconds")


def crossing(
    network: Network, ranks: int, first: str, second: str, measure: Measure, halvings: int = 5
) -> float | None:
    """Return the bytes from which ``second`` is the faster algorithm; None if it never is.

    Searched between 1 KiB and 64 MiB, to a factor of 2 ** (16 / 2 ** ``halvings``).
    """

    def is_faster(power: float) -> bool:
        nbytes = int(2**power)
        return all_reduce_s(network, ranks, nbytes, second, measure) < all_reduce_s(
            network, ranks, nbytes, first, measure
        )

    low, high = 10.0, 26.0
    if not is_faster(high):
        return None
    if is_faster(low):
        return 2.0**low
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return float(2 ** ((low + high) / 2))


def crossing_by_terms(
    network: Network, ranks: int, first: str, second: str, measure: Measure
) -> float | None:
    """Return what ``crossing`` is by the model's terms: a message's latency, and bytes by the rate.

    The latency is that of the simulated empty messages of recursive doubling.
    """
    one, other = terms_of(first, ranks), terms_of(second, ranks)
    doubled = all_reduce_s(network, ranks, 8, schedules.DOUBLING, measure)
    latency = doubled / terms_of(schedules.DOUBLING, ranks)[0]
    fewer_bytes = one[1] - other[1]
    if fewer_bytes <= 0:
        return None
    return (other[0] - one[0]) * latency * network.rate_gbit_s * 1e9 / 8 / fewer_bytes


def terms_of(algorithm: str, ranks: int) -> tuple[float, float]:
    """Return an algorithm's consecutive messages, and the bytes of a rank's link over N."""
    rounds = math.log2(ranks)
    if algorithm == schedules.DOUBLING:
        return rounds, rounds
    passes = 2 * (ranks - 1) / ranks
    return (2 * rounds if algorithm == schedules.HALVING else 2.0 * (ranks - 1)), passes


def replayed(messages: simulator.Messages) -> Measure:
    """Return the measure by SimGrid's replayer."""

    def measure(network: Network, ranks: int, processes: Iterable[Any]) -> float:
        return simulator.simulated_s(network, ranks, processes, messages)

    return measure


def median_error(entries: Iterable[Mapping[str, Any]], key: str = "relative_error") -> float:
    """Return the median of absolute relative errors."""
    return statistics.median(abs(one[key]) for one in entries)
