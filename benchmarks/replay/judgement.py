"""Judgement of the closed-form model by simulated networks: errors at sizes that nobody measured.

On each network the all-reduces of 2, 4 and 8 nodes are simulated, as a user would measure them
there with a small job. The model (``scaling.cost_model``) is fitted to these, and then asked for 64
and more nodes: single all-reduces, and whole steps with each hook. The same are simulated, and what
the model misses is its error: of the terms alone, as the simulated network has no noise.

MPICH's algorithms have log2 W messages, and their model is ``cost_model``'s fit to all sizes. Open
MPI's rings have 2·(W-1), and are sums of rounds (``exchanges``), as are the points from which one
algorithm is faster than another, and steps in shards.

Letters: W ranks, one on each node; N bytes.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replay import schedules, simulator, traces
from replay.networks import Network
from scaling import cost_model, exchanges, model, steps
from scaling.cost_model import Fit, Point, Times
from scaling.exchanges import Exchanges

FITTED_RANKS, JUDGED_RANKS = (2, 4, 8), (64, 128, 256, 512)
SIZES = tuple(1 << power for power in range(10, 27, 2))
HOOKS = ("none", "bf16", "powersgd-4")
# The printed time has whole microseconds.
_LEAST_S = 2e-4
_MOST_REPEATS = 40
# Of the search for a crossing: predictions cost nothing.
_PREDICTED_HALVINGS = 16
Measure = Callable[[Network, int, Iterable[Any]], float]
# The algorithm of an all-reduce, by its bytes and ranks.
Chooser = Callable[[int, int], str]


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
    network: Network,
    ranks: Iterable[int],
    sizes: Iterable[int],
    choose: Chooser,
    measure: Measure,
) -> list[Point]:
    """Return simulated all-reduces by a choice of algorithms."""
    found = []
    for count in ranks:
        for nbytes in sizes:
            seconds = all_reduce_s(network, count, nbytes, choose(nbytes, count), measure)
            found.append(
                Point("all_reduce", count, 1, nbytes, network.rate_gbit_s, seconds=seconds)
            )
    return found


def round_fit(network: Network, measure: Measure) -> Fit:
    """Return the fit of a round, to rings of 2, 4 and 8 nodes of a network."""
    rings = points(network, FITTED_RANKS, SIZES, lambda nbytes, ranks: exchanges.RING, measure)
    return exchanges.fit_round(rings)


@dataclass(frozen=True)
class ByAlgorithm:
    """Times of collectives by the algorithms that an MPI library takes, as sums of their rounds."""

    library: str
    round_fit: Fit

    def seconds(self, point: Point) -> float:
        """Return the time of a case; 0 for one node."""
        algorithm = schedules.chosen(self.library, point.nbytes, point.nodes)
        if point.operation != "all_reduce":
            algorithm = schedules.halved(algorithm)
        return Exchanges(algorithm, self.round_fit).seconds(point)


def fitted(network: Network, library: str, one_round: Fit, measure: Measure) -> Times:
    """Return the model of a network's all-reduces, fitted to 2, 4 and 8 nodes.

    Args:
        network: The network.
        library: Rings are sums of rounds; other algorithms have ``cost_model``'s terms.
        one_round: The network's ``round_fit``.
        measure: Of simulated times.
    """
    if schedules.takes_rings(library):
        return ByAlgorithm(library, one_round)
    choose = functools.partial(schedules.chosen, library)
    return cost_model.fit(points(network, FITTED_RANKS, SIZES, choose, measure))


def judged_collectives(
    network: Network,
    library: str,
    fit: Times,
    ranks: Iterable[int],
    measure: Measure,
    sizes: Iterable[int] | None = None,
) -> list[dict[str, Any]]:
    """Return an entry for each simulated all-reduce, with the model's time and its error."""
    choose = functools.partial(schedules.chosen, library)
    return [
        {
            "network": network.kind,
            "nodes": network.nodes,
            "rate_gbit_s": network.rate_gbit_s,
            "library": library,
            "ranks": point.nodes,
            "nbytes": point.nbytes,
            "simulated_seconds": point.seconds,
            "predicted_seconds": fit.seconds(replace(point, seconds=0.0)),
            "relative_error": cost_model.relative_error(fit, point),
        }
        for point in points(network, ranks, sizes or SIZES, choose, measure)
    ]


def judged_step(
    job: Job, network: Network, library: str, fit: Times, ranks: int, hook: str, measure: Measure
) -> dict[str, Any]:
    """Return one simulated step beside the predicted one, with the prediction's errors."""
    plan = traces.plan_of(job.compute_s, job.buckets, hook, job.costs)
    at = steps.Layout(ranks, 1, network.rate_gbit_s)
    said = steps.step(job.compute_s, job.buckets, hook, at, {"all_reduce": fit}, job.costs)
    simulated = _simulated_step_s(plan, network, library, ranks, measure)
    return _entry(job, network, library, ranks, hook, simulated, said.seconds)


def judged_shards(
    job: Job, network: Network, library: str, one_round: Fit, ranks: int, measure: Measure
) -> dict[str, Any]:
    """Return a step of an optimizer in shards: reduce-scatters, and all-gathers after the step.

    Predicted by sums of rounds whatever the library.
    """
    plan = traces.plan_of(job.compute_s, job.buckets, "none", {}, shards=True, to_owners=True)
    times = ByAlgorithm(library, one_round)

    def predicted_s(operation: str, nbytes: int) -> float:
        return times.seconds(Point(operation, ranks, 1, nbytes, network.rate_gbit_s))

    wire = [sum(predicted_s("reduce_scatter", nbytes) for nbytes in each) for each in plan.messages]
    said = steps.overlapped(plan.compute_s, plan.ready_s, plan.host_s, wire, overlaps=True)
    said += sum(predicted_s("all_gather", nbytes) for nbytes in plan.gathered)
    simulated = _simulated_step_s(plan, network, library, ranks, measure)
    return _entry(job, network, library, ranks, "none", simulated, said)


def _simulated_step_s(
    plan: traces.StepPlan, network: Network, library: str, ranks: int, measure: Measure
) -> float:
    choose = functools.partial(schedules.chosen, library, ranks=ranks)
    return measure(network, ranks, traces.step(plan, ranks, choose))


def _entry(
    job: Job,
    network: Network,
    library: str,
    ranks: int,
    hook: str,
    simulated_s: float,
    predicted_s: float,
) -> dict[str, Any]:
    exposed, said = simulated_s - job.compute_s, predicted_s - job.compute_s
    return {
        "network": network.kind,
        "nodes": network.nodes,
        "rate_gbit_s": network.rate_gbit_s,
        "library": library,
        "job": job.name,
        "ranks": ranks,
        "hook": hook,
        "compute_seconds": job.compute_s,
        "simulated_seconds": simulated_s,
        "predicted_seconds": predicted_s,
        "relative_error": predicted_s / simulated_s - 1,
        "simulated_exposed_seconds": exposed,
        "predicted_exposed_seconds": said,
        "exposed_error": said / exposed - 1,
    }


def choices(judged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest and the predicted hook of each case, and what the choice costs."""
    case = ("network", "rate_gbit_s", "library", "job", "ranks")
    return model.choices_by(case, judged, "simulated_seconds")


def crossing(
    first_s: Callable[[int], float], second_s: Callable[[int], float], halvings: int = 6
) -> float | None:
    """Return the bytes from which the second of two times is the shorter; None if it never is.

    Searched between 1 KiB and 64 MiB, to a factor of 2 ** (16 / 2 ** ``halvings``).
    """

    def is_faster(power: float) -> bool:
        nbytes = int(2**power)
        return second_s(nbytes) < first_s(nbytes)

    low, high = 10.0, 26.0
    if not is_faster(high):
        return None
    if is_faster(low):
        return 2.0**low
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return float(2 ** ((low + high) / 2))


def judged_crossing(
    network: Network, ranks: int, first: str, second: str, one_round: Fit, measure: Measure
) -> dict[str, Any]:
    """Return the bytes from which one algorithm is faster than another, simulated and predicted."""

    def simulated(algorithm: str) -> Callable[[int], float]:
        return lambda nbytes: all_reduce_s(network, ranks, nbytes, algorithm, measure)

    def predicted(algorithm: str) -> Callable[[int], float]:
        times = Exchanges(algorithm, one_round)
        return lambda nbytes: times.seconds(
            Point("all_reduce", ranks, 1, nbytes, network.rate_gbit_s)
        )

    return {
        "network": network.kind,
        "nodes": network.nodes,
        "rate_gbit_s": network.rate_gbit_s,
        "ranks": ranks,
        "first": first,
        "second": second,
        "simulated_bytes": crossing(simulated(first), simulated(second)),
        "predicted_bytes": crossing(predicted(first), predicted(second), _PREDICTED_HALVINGS),
    }


def replayed(messages: simulator.Messages) -> Measure:
    """Return the measure by SimGrid's replayer."""

    def measure(network: Network, ranks: int, processes: Iterable[Any]) -> float:
        return simulator.simulated_s(network, ranks, processes, messages)

    return measure


def median_error(entries: Iterable[Mapping[str, Any]], key: str = "relative_error") -> float:
    """Return the median of absolute relative errors."""
    return statistics.median(abs(one[key]) for one in entries)
