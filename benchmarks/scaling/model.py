"""Model of a system from the records of its jobs: points, fits, errors, costs of hooks. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scaling import cost_model, steps
from scaling.cost_model import Fit, Point

NODE, BETWEEN = "within a node", "between nodes"
# Goal of the median error on held-out points.
TARGET = 0.15
_MEASURED_AT_MOST = "largest job measured"
# Of ``steps.Contention``, for a search in numbers around 1.
_UNITS = (1e-3, 1e-9)
# Part of a step below which exposed time is noise.
_LEAST_EXPOSED = 0.05


@dataclass(frozen=True)
class Model:
    """Parameters of all predictions.

    Attributes:
        fits: By class of links (``NODE``, ``BETWEEN``), then by operation.
        costs: Costs of the hooks on one rank.
        compute_s: Seconds of a step without communication, by network and batch, from the job of
            one rank.
        flop_rate: Floating-point operations per second in these steps, the maximum over networks.
        crowding: Of layouts with several ranks on a machine (``scaling_steps.Layout``).
        contention: By class of links, of the same layouts.
    """

    fits: Mapping[str, Mapping[str, Fit]]
    costs: Mapping[str, steps.HookCost]
    compute_s: Mapping[str, Mapping[int, float]]
    flop_rate: float
    crowding: float = 1.0
    contention: Mapping[str, steps.Contention] = field(default_factory=dict)


def share_of(record: Mapping[str, Any]) -> float:
    """Return the number of ranks per core; at least 1."""
    return (
        max(1.0, record["ranks"] / record["machines"] / record["cores"])
        if record["oversubscribed"]
        else 1.0
    )


def layout_of(record: Mapping[str, Any], crowding: float = 1.0) -> steps.Layout:
    """Return the layout of a job's ranks; ``crowding`` is that of several ranks on a machine."""
    rate = cost_model.rate_of(record["link"] if record["nodes"] > 1 else "")
    return steps.Layout(
        record["nodes"],
        record["ranks_per_node"],
        rate,
        share_of(record),
        crowding if record["ranks"] > record["machines"] else 1.0,
    )


def points_of(
    records: Iterable[Mapping[str, Any]],
    compute_s: Mapping[str, Mapping[int, float]] | None = None,
    crowding: float = 1.0,
) -> list[Point]:
    """Return the measured collectives of jobs with several ranks.

    Args:
        records: Of the jobs.
        compute_s: Of one rank. A collective within a node is processor time, so that its pace is
            that of the job's own computing, relative to ``crowding``. 1 if not given.
        crowding: Of the fitted jobs.
    """
    found = []
    for record in records:
        at = layout_of(record)
        slowdowns = _slowdowns(record, compute_s or {}) if at.nodes == 1 else []
        pace = statistics.median(slowdowns) / crowding if slowdowns else 1.0
        for one in record["collectives"]:
            where = (at.nodes, at.ranks_per_node, one["nbytes"], at.rate_gbit_s, at.share)
            found.append(Point(one["operation"], *where, one["us"] / 1e6, pace))
    return [point for point in found if point.ranks > 1]


def fitted(records: Sequence[Mapping[str, Any]]) -> tuple[Model, list[dict[str, Any]]]:
    """Fit a model to a part of the points; return the model and its errors on the others."""
    alone = [one for record in records if record["ranks"] == 1 for one in record["steps"]]
    compute: dict[str, dict[int, float]] = {}
    rates = [0.0]
    for one in alone:
        seconds = one["us"]["noop"] / 1e6
        compute.setdefault(one["network"], {})[one["batch"]] = seconds
        # One multiplication and one addition per weight and sample, forward once and backward
        # twice.
        rates.append(6 * one["parameters"] * one["batch"] / seconds)
    weak = [one for one in alone if one["scaling"] == "weak"]
    crowding = crowding_of(records, compute)
    fits: dict[str, dict[str, Fit]] = {}
    errors: list[dict[str, Any]] = []
    points = points_of(records, compute, crowding)
    for name, group in (
        (NODE, [p for p in points if p.nodes == 1]),
        (BETWEEN, [p for p in points if p.nodes > 1]),
    ):
        found, missed = cost_model.validate(group)
        if found:
            fits[name] = found
        errors += [{"class": name, **one} for one in missed]
    model = Model(fits, steps.hook_costs(weak), compute, max(rates), crowding)
    contention = {name: contention_of(model, records, name) for name in fits}
    return replace(model, contention=contention), errors


def crowding_of(
    records: Iterable[Mapping[str, Any]], compute_s: Mapping[str, Mapping[int, float]]
) -> float:
    """Return the median slowdown of computing by other ranks on the same machine; 1 if unknown.

    Of the jobs that the collectives are fitted to, the steps of weak scaling that communicate
    nothing: how long a step with communication takes is not looked at.
    """
    found = [
        slowdown
        for record in records
        if record["ranks"] in cost_model.TRAINED_RANKS
        for slowdown in _slowdowns(record, compute_s)
    ]
    return max(1.0, statistics.median(found)) if found else 1.0


def _slowdowns(
    record: Mapping[str, Any], compute_s: Mapping[str, Mapping[int, float]]
) -> list[float]:
    """Return the time of a job's steps without communication over that of a rank alone.

    Of ranks that share a machine, in weak scaling; ranks per core are not part of it.
    """
    if record["ranks"] <= record["machines"]:
        return []
    return [
        one["us"]["noop"] / 1e6 / (share_of(record) * compute_s[one["network"]][one["batch"]])
        for one in record["steps"]
        if one["scaling"] == "weak" and one["batch"] in compute_s.get(one["network"], {})
    ]


def is_step_trained(
    record: Mapping[str, Any], one: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> bool:
    """Return whether the contention is fitted to a step: weak ones of the smallest network.

    Of ranks that share a machine, at ``cost_model.TRAINED_RANKS``.
    """
    sizes = [each["parameters"] for job in records for each in job["steps"]]
    return (
        one["scaling"] == "weak"
        and one["parameters"] == min(sizes)
        and record["ranks"] in cost_model.TRAINED_RANKS
        and record["ranks"] > record["machines"]
    )


def contention_of(
    model: Model, records: Sequence[Mapping[str, Any]], name: str
) -> steps.Contention:
    """Fit the contention of a class of links by the least mean relative error of exposed time."""
    cases = []
    for record in records:
        at = layout_of(record, model.crowding)
        if at.ranks == 1 or name != (NODE if at.nodes == 1 else BETWEEN):
            continue
        for one in record["steps"]:
            if is_step_trained(record, one, records) and one["network"] in model.compute_s:
                cases += [(record, one, hook) for hook in one["exposed_us"]]
    if not cases or "all_reduce" not in model.fits[name]:
        return steps.Contention()
    # Here, because predictions need no scipy.
    from scipy.optimize import minimize

    def contention(values: Any) -> steps.Contention:
        return steps.Contention(
            *(abs(float(v)) * unit for v, unit in zip(values, _UNITS, strict=True))
        )

    def error(values: Any) -> float:
        tried = replace(model, contention={name: contention(values)})
        return statistics.fmean(
            abs(predicted(tried, record, one, hook).seconds - one["us"][hook] / 1e6)
            / max(one["exposed_us"][hook], _LEAST_EXPOSED * one["us"][hook])
            * 1e6
            for record, one, hook in cases
        )

    starts = ((1.0, 1.0), (0.1, 0.1))
    found = [minimize(error, start, method="Nelder-Mead") for start in starts]
    return contention(min(found, key=lambda one: one.fun).x)


def predicted(
    model: Model, record: Mapping[str, Any], one: Mapping[str, Any], hook: str
) -> steps.Step:
    """Return the predicted step of a job's entry; nothing is fitted."""
    at = layout_of(record, model.crowding)
    where = NODE if at.nodes == 1 else BETWEEN
    compute = steps.compute_of(model.compute_s[one["network"]], one["batch"])
    planned = steps.buckets_of([tuple(shape) for shape in one["shapes"]], record["bucket_cap_mb"])
    ready = [bucket["ready"] for bucket in one["buckets"]]
    if len(ready) == len(planned):
        planned = [steps.Bucket(b.shapes, at_) for b, at_ in zip(planned, ready, strict=True)]
    none = steps.Contention()
    shares = record["ranks"] > record["machines"]
    contention = model.contention.get(where, none) if shares else none
    return steps.step(compute, planned, hook, at, model.fits[where], model.costs, contention)


def measured_steps(model: Model, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an entry per measured step: its time, and for several ranks the prediction.

    ``fitted`` marks the steps that the contention is fitted to; no other was used for fitting.
    """
    found = []
    for record in records:
        at = layout_of(record, model.crowding)
        where = NODE if at.nodes == 1 else BETWEEN
        for one in record["steps"]:
            for hook, exposed_us in one["exposed_us"].items():
                entry = {
                    "ranks": record["ranks"],
                    "nodes": at.nodes,
                    "link": record["link"],
                    "oversubscribed": record["oversubscribed"],
                    "network": one["network"],
                    "scaling": one["scaling"],
                    "batch": one["batch"],
                    "hook": hook,
                    "seconds": one["us"][hook] / 1e6,
                    "exposed_seconds": exposed_us / 1e6,
                    "efficiency": efficiency(model, record, one, hook),
                }
                if (
                    at.ranks > 1
                    and "all_reduce" in model.fits.get(where, {})
                    and one["network"] in model.compute_s
                ):
                    step = predicted(model, record, one, hook)
                    entry["predicted_seconds"] = step.seconds
                    entry["relative_error"] = step.seconds / entry["seconds"] - 1
                    entry["predicted_exposed_seconds"] = step.exposed_s
                    entry["fitted"] = is_step_trained(record, one, records)
                found.append(entry)
    return found


def efficiency(
    model: Model, record: Mapping[str, Any], one: Mapping[str, Any], hook: str
) -> float | None:
    """Return the speed-up over one rank without communication, divided by the number of ranks.

    Ranks that share a core count as their share of the core: otherwise 8 ranks on 2 cores would
    reach a quarter at best.
    """
    known = model.compute_s.get(one["network"])
    if known is None:
        return None
    # In strong scaling one rank would compute the samples of all ranks in one step.
    together = record["ranks"] if one["scaling"] == "strong" else 1
    return (
        steps.compute_of(known, one["batch"] * together)
        / together
        * share_of(record)
        / (one["us"][hook] / 1e6)
    )


def choices(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest and the predicted hook of each measured weak step of several ranks.

    ``lost`` is the predicted hook's extra time, relative to the fastest step.
    """
    weak = [one for one in measured if one["scaling"] == "weak" and "predicted_seconds" in one]
    return choices_by(("link", "ranks", "network", "oversubscribed"), weak, "seconds")


def choices_by(
    case: Sequence[str], steps: Sequence[Mapping[str, Any]], seconds: str
) -> list[dict[str, Any]]:
    """Return the fastest and the predicted hook of each case.

    Args:
        case: Fields that name a case; its steps differ by their hook.
        steps: Steps with these fields, ``hook`` and ``predicted_seconds``.
        seconds: Field of the true time.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in steps:
        groups.setdefault(tuple(one[name] for name in case), []).append(one)
    found = []
    for values, group in groups.items():
        fastest = min(group, key=lambda one: one[seconds])
        chosen = min(group, key=lambda one: one["predicted_seconds"])
        found.append(
            {
                **dict(zip(case, values, strict=True)),
                "fastest": fastest["hook"],
                "chosen": chosen["hook"],
                "lost": chosen[seconds] / fastest[seconds] - 1,
            }
        )
    return found


def predictions(
    model: Model, records: Sequence[Mapping[str, Any]], most: int = 4096
) -> list[dict[str, Any]]:
    """Return predicted weak steps of 1 to ``most`` ranks, one per node, over each measured link.

    Every rank has a core of its own. Without a measured link the result is empty, because no node
    has 4096 ranks.
    """
    links = sorted(
        {record["link"] for record in records if record["nodes"] > 1}, key=cost_model.rate_of
    )
    largest = max((record["ranks"] for record in records), default=1)
    networks = {
        one["network"]: (one, record)
        for record in records
        for one in record["steps"]
        if one["scaling"] == "weak"
    }
    found = []
    for link in links if BETWEEN in model.fits else []:
        for name, (one, record) in networks.items():
            if name not in model.compute_s:
                continue
            compute = steps.compute_of(model.compute_s[name], one["batch"])
            buckets = steps.buckets_of(
                [tuple(shape) for shape in one["shapes"]], record["bucket_cap_mb"]
            )
            for power in range(1, int(math.log2(most)) + 1):
                ranks = 1 << power
                at = steps.Layout(ranks, 1, cost_model.rate_of(link))
                for hook in steps.HOOKS:
                    step = steps.step(compute, buckets, hook, at, model.fits[BETWEEN], model.costs)
                    found.append(
                        {
                            "link": link,
                            "network": name,
                            "batch": one["batch"],
                            "ranks": ranks,
                            "hook": hook,
                            "predicted_seconds": step.seconds,
                            "exposed_seconds": step.exposed_s,
                            "efficiency": compute / step.seconds,
                            "beyond_measured": ranks > largest,
                            _MEASURED_AT_MOST: largest,
                        }
                    )
    return found


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


def to_json(model: Model) -> dict[str, Any]:
    """Return a model as plain data; an infinite end of a range becomes null in a file."""
    return {
        "terms": list(cost_model.TERMS),
        "fits": {
            name: {operation: asdict(fit) for operation, fit in group.items()}
            for name, group in model.fits.items()
        },
        "hook_costs": {hook: asdict(cost) for hook, cost in model.costs.items()},
        "compute_s": {
            network: {str(batch): s for batch, s in group.items()}
            for network, group in model.compute_s.items()
        },
        "flop_rate": model.flop_rate,
        "crowding": model.crowding,
        "contention": {name: asdict(one) for name, one in model.contention.items()},
    }


def from_json(data: Mapping[str, Any]) -> Model:
    """Return the model that ``to_json`` wrote.

    Raises:
        ValueError: The data is something else, or its version has other terms.
    """
    if list(data.get("terms", ())) != list(cost_model.TERMS) or "crowding" not in data:
        raise ValueError(
            "the file holds no model with the terms that are known here: write it again with "
            "`report` or `sweep`"
        )
    fits = {
        name: {
            operation: Fit(
                operation,
                tuple(map(_number, fit["ends"])),
                tuple(tuple(map(float, row)) for row in fit["parameters"]),
                tuple(_ratios(one) for one in fit.get("ratios", ())),
            )
            for operation, fit in group.items()
        }
        for name, group in data["fits"].items()
    }
    compute = {
        network: {int(batch): s for batch, s in group.items()}
        for network, group in data["compute_s"].items()
    }
    return Model(
        fits,
        {hook: steps.HookCost(**cost) for hook, cost in data["hook_costs"].items()},
        compute,
        data["flop_rate"],
        data["crowding"],
        {name: steps.Contention(**one) for name, one in data.get("contention", {}).items()},
    )


def _ratios(data: Mapping[str, Any]) -> cost_model.Ratios:
    rate = _number(data["rate_gbit_s"])
    shape = data["ranks_per_node"], data["ranks"]
    return cost_model.Ratios(*shape, rate, tuple(data["sizes"]), tuple(data["logs"]))
