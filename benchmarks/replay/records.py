"""Records of judged networks: the cases of several runs in one. Pure.

A ring of many nodes takes minutes, so that a record is made in parts (``bench_replay.py judge
--add``). All have the same assumptions but the network's size, and the model that the size of the
network gives; each run is listed with its date and its options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replay import judgement

# Names of a record's parts, and what tells two of a part's cases apart.
_CASE = ("network", "nodes", "rate_gbit_s")
_STEP = (*_CASE, "library", "job", "ranks", "hook")
PARTS = {
    "collectives": (*_CASE, "library", "ranks", "nbytes"),
    "steps": _STEP,
    "shards": _STEP,
    "crossings": (*_CASE, "ranks", "first", "second"),
}
# What the cases of a record have in common.
_COMMON = ("latency_us", "overhead_us", "taper", "fitted_ranks")
_GROUP = ("network", "rate_gbit_s", "library", "job", "first", "second")


def added(record: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the cases of another run, which replace equal ones.

    Args:
        record: Its assumptions and the order of its networks stay.
        run: A record, too.

    Raises:
        ValueError: The two were made by other versions of SimGrid or other assumptions.
    """
    for name in _COMMON:
        old, new = record["assumptions"][name], run["assumptions"][name]
        if old != new:
            raise ValueError(f"the record has {name} {old}, and not {new}")
    if record["simgrid"] != run["simgrid"]:
        raise ValueError(f"the record is of SimGrid {record['simgrid']}, not {run['simgrid']}")
    found = {**record, "runs": [*record["runs"], *run["runs"]]}
    for name, keys in PARTS.items():
        cases = {tuple(one[key] for key in keys): one for one in (*record[name], *run[name])}
        found[name] = _ordered(list(cases.values()))
    found["choices"] = judgement.choices(found["steps"])
    return found


def _ordered(cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return cases of one group together, as groups first appear, by ranks and bytes."""
    groups = list(dict.fromkeys(map(_group, cases)))
    return sorted(
        cases, key=lambda one: (groups.index(_group(one)), one["ranks"], one.get("nbytes", 0))
    )


def _group(case: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(case.get(key) for key in _GROUP)
