"""Time sharded optimizers: the step, its parts, consolidation, and bytes of state.

mpirun --bind-to none -n 2 python benchmarks/bench_oss.py    (pip install fairscale for its OSS)
benchmarks/slow_link.sh 1gbit MPIRUN python benchmarks/bench_oss.py --rounds 3    (MPICH's mpirun)

The model has 8.4 M fp32 parameters; its gradients are constant.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from harness import benchmark_options, report, tables, timing
from harness.job import Job
from harness.timing import Contender, Series
from mpidist import progress_bar
from mpidist.zero.shards.pieces import Gradients
from optimizer import state_bytes
from optimizer.cases import WAYS, Peers, check, mlp, muons, optimizers

_ROUNDS, _BURST_S = 15, 0.05
_KERNELS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "fused": {"fused": True}}
# (case, faster contender, slower contender, smallest ratio)
_GOALS = (
    ("Adam, loop", "mpidist", "FairScale on Gloo", 1.8),
    ("Adam, fused", "mpidist", "FairScale on Gloo", 2.6),
    ("Adam, fused", "mpidist flat", "FairScale on Gloo", 2.6),
    ("Adam, fused", "mpidist flat, one copy", "FairScale on Gloo", 4.0),
    ("consolidation", "mpidist, memory used again", "FairScale on Gloo", 8.0),
    ("consolidation", "mpidist, fresh memory", "FairScale on Gloo", 6.0),
    ("Muon", "mpidist balanced", "unsharded", 1 / 0.6),
)


def parts_of(peers: Peers, built: dict[str, Any]) -> list[Contender]:
    """Return a step's parts: base optimizer, gather, and a copy of the other shards' bytes."""
    found = []
    for name in WAYS:
        oss = built[name]
        if not oss._shards.steps_parameters:
            Gradients(oss._shards.pieces, []).attach()
        found.append(_contender(f"{name}: base optimizer", oss.optim.step))
        if "one copy" not in name:
            found.append(_contender(f"{name}: gather", partial(_gather, oss)))
    flat = built["mpidist flat"]._shards
    (plan,), rank = flat.plans, peers.native.rank
    own = plan.bounds[rank + 1] - plan.bounds[rank]
    source, target = (torch.ones(plan.numel - own) for _ in range(2))
    found.append(_contender("copy of the others' shards", lambda: target.copy_(source)))
    return found


def _gather(oss: Any) -> None:
    oss.group.barrier()  # in a step the all-reduce behind the base optimizer
    oss._shards.gather()


def consolidations(built: dict[str, Any]) -> Iterator[Contender]:
    ours = built["mpidist"]
    held: list[Any] = []

    def again() -> None:
        # The next result reuses the memory of the last one.
        held.clear()
        ours.consolidate_state_dict(0)

    def fresh() -> None:
        ours.consolidate_state_dict(0)
        if ours.rank == 0:
            # The next result needs new memory while this one is alive.
            held[:] = [ours.state_dict()]

    yield _contender("mpidist, memory used again", again)
    yield _contender("mpidist, fresh memory", fresh)
    if "FairScale on Gloo" in built:
        yield _contender(
            "FairScale on Gloo", lambda: built["FairScale on Gloo"].consolidate_state_dict(0)
        )
    for name in ("torch on Gloo", "torch on mpidist"):
        yield _contender(name, lambda name=name: built[name].consolidate_state_dict(0))


def _contender(name: str, call: Callable[[], Any]) -> Contender:
    return Contender(name, (call,), ())


def measured_bytes(peers: Peers, built: dict[str, Any]) -> dict[str, list[int]]:
    """Return each rank's bytes of optimizer state as allocated now."""
    found = {}
    for name, optimizer in built.items():
        held = getattr(optimizer, "optim", optimizer).state.values()
        own = sum(
            value.nbytes
            for state in held
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        found[name] = peers.native.all_gather_object(own)
    return found


def ratios(results: list[dict[str, Any]]) -> list[tuple[str, str, str, float, float]]:
    """Return the goals and the measured ratios of medians."""
    rows = []
    for case, ours, peer, goal in _GOALS:
        for result in results:
            medians = {name: values["median_us"] for name, values in result["contenders"].items()}
            if result["operation"] == case and ours in medians and peer in medians:
                rows.append((case, ours, peer, goal, medians[peer] / medians[ours]))
    return rows


def overheads(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return the step's time beyond the base optimizer, over the copy of the other shards."""
    found = {}
    cases = {
        result["operation"]: {
            name: values["median_us"] for name, values in result["contenders"].items()
        }
        for result in results
    }
    for kernel in _KERNELS:
        whole, parts = cases[f"Adam, {kernel}"], cases[f"parts of Adam, {kernel}"]
        for name in WAYS:
            rest = whole[name] - parts[f"{name}: base optimizer"]
            found[f"Adam, {kernel}: {name}"] = rest / parts["copy of the others' shards"]
    return found


def main() -> None:
    options = benchmark_options.parser(__doc__, "link", "quick", rounds=_ROUNDS).parse_args()
    rounds, burst_s = (2, 0.001) if options.quick else (options.rounds, _BURST_S)
    depth, width = (2, 64) if options.quick else (8, 1024)
    results: list[dict[str, Any]] = []
    held_bytes: dict[str, list[int]] = {}

    def run(case: str, contenders: list[Contender]) -> None:
        series: list[Series] = timing.time_rounds(job.raw, contenders, rounds, burst_s)
        results.append(report.result_of(case, 0, 0, series))
        if job.is_first:
            rows = [
                (s.name, s.median_us / 1e3, s.percentile_us(10) / 1e3, s.percentile_us(90) / 1e3)
                for s in series
            ]
            headers = ("contender", "ms, median", "p10", "p90")
            print(f"\n{case}\n{tables.text(rows, headers, floats='.2f')}", flush=True)
        advance()

    # Each kernel has its steps and their parts; consolidation and Muon are one case each.
    cases = 2 * len(_KERNELS) + 2
    with (
        Job(least=1, uses_torch=True) as job,
        progress_bar.bar("cases", cases, job.rank) as advance,
    ):
        peers = Peers(job.group)
        if not options.quick:
            timing.touch_memory()
        for kernel, settings in _KERNELS.items():
            built = optimizers(peers, lambda: mlp(depth, width), lr=1e-3, **settings)
            check(peers, built)
            contenders = [_contender(name, optimizer.step) for name, optimizer in built.items()]
            run(f"Adam, {kernel}", contenders)
            run(f"parts of Adam, {kernel}", parts_of(peers, built))
            if kernel == "loop":
                held_bytes = measured_bytes(peers, built)
                run("consolidation", list(consolidations(built)))
            del built, contenders
        matrices = muons(peers, depth // 2, width // 2)
        run("Muon", [_contender(name, optimizer.step) for name, optimizer in matrices.items()])
        if job.is_first:
            found = _conclusions(results, held_bytes)
            link = {"link": options.link} if options.link else {}
            fields = {**link, "rounds": rounds, "results": results, **found}
            job.write(options.output, "oss", fields, parts=[options.link])
    peers.native.close()


def _conclusions(results: list[dict[str, Any]], held_bytes: dict[str, list[int]]) -> dict[str, Any]:
    """Print the goals, overheads and bytes of state; return them for the record."""
    reached, by_arithmetic = ratios(results), state_bytes.rows()
    headers = ("case", "ours", "peer", "to reach", "times faster")
    print(f"\n{tables.text(reached, headers, floats='.2f')}")
    print("\nStep less the base optimizer's, over a copy of the others' shards (1.5 to reach):")
    print(tables.text(sorted(overheads(results).items()), floats=".2f"))
    print("\nState of each rank, MiB: ")
    print(
        tables.text(
            [(name, *(f"{n / 2**20:.2f}" for n in held)) for name, held in held_bytes.items()]
        )
    )
    print(
        "\nAdam's state on the fullest rank, and its ratio to an even "
        f"share\n{state_bytes.table(by_arithmetic)}"
    )
    return {
        "goals": [
            dict(zip(("case", "ours", "peer", "goal", "ratio"), row, strict=True))
            for row in reached
        ],
        "overheads": overheads(results),
        "state_bytes": held_bytes,
        "state_bytes_by_arithmetic": by_arithmetic,
        "median_goal_ratio": statistics.median(row[4] for row in reached) if reached else None,
    }


if __name__ == "__main__":
    main()
