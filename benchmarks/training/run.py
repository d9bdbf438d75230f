"""Common run of the benchmarks of training steps: command line, measurement, record."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from harness import benchmark_options, devices, timing
from harness.job import Job
from mpidist import progress_bar
from training import cases
from training import report as training_report

Measured = tuple[Sequence[timing.Series], dict[str, float]]


def run(
    benchmark: str,
    measure: Callable[[Any, cases.Model, argparse.Namespace], Measured],
    options: argparse.Namespace,
    counted: str = "bytes_sent",
) -> None:
    """Measure each model and write the record.

    Collective: over all ranks.

    Args:
        measure: Receives an mpi4py communicator, a model and the options; returns the contenders'
            times, and per contender the bytes that it sends, or another figure.
        counted: Name of that figure in the record.
    """
    device = devices.chosen(options.device)
    with Job(least=1, uses_torch=True, device=device) as job:
        timing.touch_memory()
        results = []
        for text in progress_bar.track(options.models, benchmark, job.rank):
            name, size = text.split(":")
            model = cases.MODELS[name](int(size)).on(device)
            series, figures = measure(job.raw, model, options)
            result = training_report.result_of(model, series, "bare")
            for contender, figure in figures.items():
                result["contenders"][contender][counted] = figure
            results.append(result)
            if job.is_first:
                print(training_report.table(result), flush=True)
        if job.is_first:
            fields = {
                "link": options.link,
                "bucket_cap_mb": options.bucket_cap_mb,
                "rounds": options.rounds,
                "results": results,
            }
            on = "" if device.type == "cpu" else devices.name_of(device)
            job.write(options.output, benchmark, fields, parts=[on, options.link, options.suffix])


def arguments(
    description: str, models: Sequence[str], rounds: int, bucket_cap_mb: float | None
) -> argparse.Namespace:
    """Parse the command line; a cap other than the default becomes part of the file's name."""
    parser = benchmark_options.parser(description, "link", rounds=rounds)
    parser.add_argument(
        "--models", nargs="+", default=models, metavar="NAME:BATCH", help=", ".join(cases.MODELS)
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=float,
        default=bucket_cap_mb,
        help="of all contenders; 25 if there is no default",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the models are; a GPU is named in the file's name",
    )
    options = parser.parse_args()
    options.suffix = (
        "" if options.bucket_cap_mb == bucket_cap_mb else f"cap{options.bucket_cap_mb:g}"
    )
    return options
