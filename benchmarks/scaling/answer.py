"""Fastest communication hook as text: tables of a report, and the answer for one user's case."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness import tables
from scaling import jobs as scaling_jobs
from scaling import memory_estimate, steps
from scaling import model as models
from scaling.advice import (
    BANDWIDTHS,
    LEAST_GBIT_S,
    MOST_GBIT_S,
    Case,
    Processor,
    crossings,
    fastest,
    processors,
    shapes_of,
    times,
)

_MIB = 1 << 20


def text_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of the fastest hooks, and of the bandwidths at which they change."""
    if not rows:
        return (
            "Which hook pays: no links were measured (sweep --links 10gbit 1gbit 100mbit), so "
            "nothing can be said"
        )
    headers = (
        "",
        "network",
        "ranks",
        "computing\nms",
        *(f"{rate:g} Gbit/s" for rate in BANDWIDTHS),
    )
    lines = []
    for row in rows:
        cells = []
        for rate, hook in row["fastest"].items():
            found = row["predicted_seconds"][rate]
            cells.append(hook if hook == "none" else f"{hook} ×{found['none'] / found[hook]:.1f}")
        lines.append(
            (
                row["processor"],
                row["network"],
                row["ranks"],
                f"{1e3 * row['compute_s']:.0f}",
                *cells,
            )
        )
    crossed = [
        (
            row["processor"],
            row["network"],
            _changes(row["fastest_up_to_gbit_s"]),
        )
        for row in rows
        if row["fastest_up_to_gbit_s"]
    ]
    return "\n".join(
        [
            "Which hook pays, PREDICTED, one rank a node: the fastest, and how many times faster "
            "than uncompressed",
            tables.text(lines, headers, keys=3),
            "\nUp to which Gbit/s, PREDICTED, 64 ranks "
            f"(looked for from {LEAST_GBIT_S:g} to {MOST_GBIT_S:g})",
            tables.text(crossed, ("", "network", "fastest")),
        ]
    )


def _changes(crossed: Iterable[tuple[str, float]], unit: str = "") -> str:
    """Return the hooks in the order of the networks on which each is the fastest."""
    return ", then ".join(
        hook if rate == float("inf") else f"{hook} up to {float(f'{rate:.2g}'):g}{unit}"
        for hook, rate in crossed
    )


def answer(options: Any) -> str:
    """Return the fastest hook for a user's case, with all assumptions.

    Raises:
        SystemExit: There is no model, or none with links; the text describes how to measure one.
    """
    path = _model_path(options.model)
    try:
        model = models.from_json(json.loads(path.read_text(encoding="utf-8"))["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(
            f"{path.name} holds no model ({error}): write it again with `sweep` or `report`"
        ) from None
    source = f"hooks' costs of the model in {path.name}"
    if options.measure:
        model = _measured_here(model, options)
        source = "hooks' costs and computing measured here just now"
    by_name = {one.name: one for one in processors(model)}
    name, why = processor_of(options)
    if name not in by_name:
        raise SystemExit(
            f"{path.name} has no measured links or hooks: `sweep --links 10gbit 1gbit` measures "
            "them"
        )
    source = source if name == "cpu" else "hooks as on an H100"
    return _text_of_answer(options, by_name[name], f"{name} ({why}); {source}")


def processor_of(options: Any) -> tuple[str, str]:
    """Return the processor of the user's ranks, and how it was found: given, seen, measured, asked.

    Raises:
        SystemExit: It is not known, and there is no terminal to ask.
    """
    if options.processor is not None:
        return options.processor, "given"
    if options.measure:
        # The job of one rank computes on the CPU.
        return "cpu", "measured"
    if torch.cuda.is_available():
        return "gpu", f"{torch.cuda.get_device_name()} is seen here"
    if sys.stdin.isatty() and sys.stderr.isatty():
        from rich.console import Console
        from rich.prompt import Prompt

        to = Console(file=sys.stderr)
        question = "No GPU is seen here. Processor of the ranks"
        return Prompt.ask(question, console=to, choices=["gpu", "cpu"]), "answered"
    raise SystemExit(
        "the answer depends on the processor, and no GPU is seen here: --processor gpu, or "
        "--processor cpu (as measured in the model), or --measure for this machine's"
    )


def memory(options: Any) -> str:
    """Return the memory of the fullest rank, by what it holds."""
    training = memory_estimate.Training(
        options.ranks,
        options.optimizer,
        options.partition,
        memory_estimate.DTYPES[options.dtype],
        options.powersgd_rank,
        options.copy_gradients,
        int(options.activations_mib * _MIB),
    )
    found = memory_estimate.estimate(shapes_of(int(options.parameters)), training)
    total = sum(found.values())
    rows = [(name, f"{nbytes / _MIB:,.1f}") for name, nbytes in [*found.items(), ("sum", total)]]
    return (
        f"{options.parameters:g} parameters of {options.dtype}, {options.ranks} ranks: "
        f"{total / _MIB:,.0f} MiB on the fullest rank (PREDICTED)\n"
        f"{tables.text(rows, ('of a rank', 'MiB'))}\n"
        "not in it: torch, CUDA and MPI themselves, temporary tensors, what an allocator keeps"
        f"{'' if options.activations_mib else '; activations (--activations-mib)'}. Gradients are "
        "shaped as GPT-2's"
    )


def _model_path(path: Path | None) -> Path:
    """Return the path of the model: the named one, or the first of the results."""
    if path is None:
        written = sorted((Path(__file__).resolve().parents[1] / "results").glob("scaling-*.json"))
        path = next(
            (one for one in written if "model" in json.loads(one.read_text(encoding="utf-8"))), None
        )
    if path is None or not path.is_file():
        raise SystemExit(
            "no model: make one by `bench_scaling.py sweep --links 10gbit 1gbit`, or `report "
            "FILES`; name it by --model"
        )
    return path


def _text_of_answer(options: Any, processor: Processor, source: str) -> str:
    """Return the predicted steps by hook, and the assumptions; ``source`` names the costs'."""
    buckets = steps.buckets_of(shapes_of(int(options.parameters)), options.bucket_cap_mb)
    compute_s = (
        options.compute_ms / 1e3 if options.compute_ms else processor.compute_s(options.parameters)
    )
    case = Case(compute_s, buckets, options.ranks, options.ranks_per_node)
    found = times(case, options.bandwidth, processor)
    best = fastest(found)
    rows = [
        (
            hook,
            f"{1e3 * s:.1f}",
            f"{1e3 * (s - compute_s):.1f}",
            f"{found['none'] / s:.2f}",
            "<- fastest" if hook == best else "",
        )
        for hook, s in found.items()
    ]
    computing = (
        "given"
        if options.compute_ms
        else f"6 · parameters · {processor.samples} samples / {processor.flop_rate:.2g} a second"
    )
    changes = _changes(crossings(case, processor), " Gbit/s")
    table = tables.text(
        rows,
        ("hook", "step, ms", "exposed, ms", "× uncompressed", ""),
    )
    return (
        f"{options.parameters:g} parameters, {options.ranks} ranks, {options.ranks_per_node} a "
        "node, "
        f"{options.bandwidth:g} Gbit/s: {best} is the fastest (PREDICTED)\n{table}\n"
        f"as the bandwidth rises: {changes}\n"
        f"assumed: computing {1e3 * compute_s:.1f} ms a step ({computing}); gradients shaped as "
        f"GPT-2's, in {len(buckets)} buckets; {source}; latencies as measured over TCP; a flat "
        "all-reduce of all ranks; the step's own computing stays the same. A hook that changes "
        "the gradients needs a look at the accuracy"
    )


def _measured_here(model: models.Model, options: Any) -> models.Model:
    passed = ["measure", "--operations", "barrier", "--networks", "512x4", "1024x4"]
    records, why = scaling_jobs.run(
        scaling_jobs.plain(1, passed, options.launcher), options.limit_s
    )
    if why is not None:
        raise SystemExit(
            f"the job of one rank that measures this machine: {why}. Without --measure the model's "
            "own costs are taken"
        )
    here, _ = models.fitted(records)
    return replace(model, costs=here.costs, compute_s=here.compute_s, flop_rate=here.flop_rate)
