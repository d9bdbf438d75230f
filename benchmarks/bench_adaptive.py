"""Time the adaptive hook against each fixed one, after its trial; count right answers on digits.

mpirun --bind-to none -n 2 python benchmarks/bench_adaptive.py
benchmarks/slow_link.sh 100mbit MPIRUN python benchmarks/bench_adaptive.py    (MPICH's mpirun)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from harness import benchmark_options, report, tables, timing
from harness.job import Job
from mpidist import ddp
from mpidist.comm.group_types import Group
from training import cases

MODELS = ["mlp:64", "resnet18:8", "transformer:8"]
# The watch over the steps' length would see the other contenders' steps.
NEVER = 1 << 30
MOST_STEPS = 60  # until a decision


def fixed_hooks(group: Group) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return functions of (state, hook) by the adaptive hook's candidates."""

    def powersgd(rank: int) -> tuple[Any, Any]:
        return ddp.PowerSGDState(group, rank, start_powerSGD_iter=0), ddp.powerSGD_hook

    return {
        "none": lambda: (group, ddp.allreduce_hook),
        "bf16": lambda: (group, ddp.bf16_compress_hook),
        "uint8": lambda: (group, ddp.quantization_perchannel_hook),
        "powersgd-4": partial(powersgd, 4),
        "powersgd-1": partial(powersgd, 1),
    }


def measure(
    group: Group, raw: Any, model: cases.Model, options: argparse.Namespace
) -> dict[str, Any]:
    """Check and time one model's steps.

    Collective: over the group.

    Raises:
        RuntimeError: The adaptive hook does not decide, or its gradients and errors lose something.
    """
    batch, cap = cases.own_batch(model), options.bucket_cap_mb
    hooks = fixed_hooks(group)

    def contender(name: str, state: Any, hook: Any) -> timing.Contender:
        net = cases.ours(model, state, hook, process_group=group, bucket_cap_mb=cap)
        return cases.contender(name, net, batch)

    state = ddp.AdaptiveState(group, tuple(hooks), check_interval=NEVER)
    adaptive = contender("adaptive", state, ddp.adaptive_hook)
    while not state.is_decided:
        adaptive.calls[0]()
        if state.iter > MOST_STEPS:
            raise RuntimeError(f"{model.name}: not decided after {state.iter} steps")
    trial_steps = state.iter
    adaptive.calls[0]()  # the first one with the decisions
    fixed = [contender(name, *made()) for name, made in hooks.items()]
    bare = cases.contender("bare", cases.build(model), batch)
    lost = _lost(group, model, state, adaptive, fixed[0])
    if lost > 0.02:
        raise RuntimeError(f"{model.name}: the adaptive hook loses {lost:.1e} of the gradients")
    first = timing.time_rounds(raw, [bare, *fixed], options.rounds, 0.0)
    best = min(first[1:], key=lambda one: one.median_us).name
    # The spread of two runs of the best fixed hook is what two modules with it differ by.
    again = contender("", *hooks[best]())
    chosen = next(one for one in fixed if one.name == best)
    close = [
        replace(chosen, name=f"{best}, first"), replace(again, name=f"{best}, again"), adaptive,
    ]  # fmt: skip
    second = timing.time_rounds(raw, close, 2 * options.rounds, 0.0)
    one, other, own = (series.median_us for series in second)
    result = {
        "model": model.name,
        "parameters": model.numel(),
        "trial_steps": trial_steps,
        "lost": lost,
        "decisions": [[row.numel, row.method, row.sent_bytes] for row in state.table()],
        "best_fixed": best,
        "spread": max(one, other) / min(one, other),
        # The shorter of the two would be shorter than a third run of the same hook, too.
        "adaptive_over_best": 2 * own / (one + other),
        "contenders": {series.name: report.series_record(series) for series in (*first, *second)},
    }
    if group.rank == 0:
        print(_text(result), flush=True)
    return result


def _lost(
    group: Group,
    model: cases.Model,
    state: ddp.AdaptiveState,
    adaptive: timing.Contender,
    plain: timing.Contender,
) -> float:
    """Return what average, sent part and errors of a step differ by, relative to the average."""

    def errors() -> dict[str, torch.Tensor]:
        mean = {name: error.clone() for name, error in sorted(state.error_dict.items())}
        for error in mean.values():
            group.all_reduce(error, "avg")
        return mean

    before = errors()
    adaptive.calls[0]()
    after = errors()
    plain.calls[0]()
    names = [name for name, _ in cases.build(model).named_parameters()]
    rest, whole = 0.0, 0.0
    for name, sent, truth in zip(names, adaptive.outputs, plain.outputs, strict=True):
        zero = torch.zeros(())
        lost = truth + before.get(name, zero) - sent - after.get(name, zero)
        rest, whole = rest + float(lost.square().sum()), whole + float(truth.square().sum())
    return (rest / whole) ** 0.5


def accuracies(group: Group, options: argparse.Namespace) -> dict[str, Any]:
    """Train on the digits with and without the adaptive hook, once for each seed."""
    from training import digits

    found: dict[str, list[float]] = {"none": [], "adaptive": []}
    decisions = []
    for seed in range(options.seeds):
        plain = digits.accuracy(group, seed, options.epochs, ddp.allreduce_hook, group)
        state = ddp.AdaptiveState(group, min_compression_rate=1)
        own = digits.accuracy(group, seed, options.epochs, ddp.adaptive_hook, state)
        found["none"].append(plain)
        found["adaptive"].append(own)
        decisions.append([row.method for row in state.table()])
        if group.rank == 0:
            print(f"digits, seed {seed}: {plain:.2%}, adaptive {own:.2%}", flush=True)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return {"epochs": options.epochs, "accuracies": found, "means": means, "decisions": decisions}


def _text(result: dict[str, Any]) -> str:
    rows = [
        (name, f"{values['median_us'] / 1e3:.1f}", f"{values['p10_us'] / 1e3:.1f}",
         f"{values['p90_us'] / 1e3:.1f}")
        for name, values in result["contenders"].items()
    ]  # fmt: skip
    methods = [method for _, method, _ in result["decisions"]]
    return (
        f"{tables.text(rows, (result['model'], 'step, ms', 'p10', 'p90'))}\n"
        f"decided after {result['trial_steps']} steps: {', '.join(methods)}\n"
        f"adaptive / {result['best_fixed']}: {result['adaptive_over_best']:.3f}; two runs of it "
        f"differ by {result['spread']:.3f}\n"
    )


def main() -> None:
    parser = benchmark_options.parser(__doc__, "link", "quick", rounds=8)
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="NAME:BATCH")
    parser.add_argument("--bucket-cap-mb", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=0, help="trainings on digits")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.bucket_cap_mb = ["many:2"], 1, 0.2
        options.seeds, options.epochs = 1, 1
    with Job(uses_torch=True) as job:
        results = []
        for text in options.models:
            name, batch = text.split(":")
            model = cases.MODELS[name](int(batch))
            results.append(measure(job.group, job.raw, model, options))
        digits = accuracies(job.group, options) if options.seeds else None
        if job.is_first:
            fields = {
                "link": options.link,
                "bucket_cap_mb": options.bucket_cap_mb,
                "rounds": options.rounds,
                "results": results,
                "digits": digits,
            }
            job.write(options.output, "adaptive", fields, parts=[options.link])
            ratios = [result["adaptive_over_best"] for result in results]
            if ratios:
                print(f"adaptive over the best fixed hook: median {median(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main()
