"""Common run of the benchmarks of training steps: command line, measurement, record."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness import benchmark_options, devices, environment, timing
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
    torch.set_num_threads(1)
    device = devices.chosen(options.device)
    dist.init_process_group("mpidist")
    # mpidist prepares the MPI library before the import of mpi4py.MPI starts MPI.
    from mpi4py import MPI

    raw = MPI.COMM_WORLD.Dup()
    about = environment.describe(raw, device)
    is_first = raw.Get_rank() == 0
    timing.touch_memory()
    results = []
    for text in progress_bar.track(options.models, benchmark, raw.Get_rank()):
        name, size = text.split(":")
        model = cases.MODELS[name](int(size)).on(device)
        series, figures = measure(raw, model, options)
        result = training_report.result_of(model, series, "bare")
        for contender, figure in figures.items():
            result["contenders"][contender][counted] = figure
        results.append(result)
        if is_first:
            print(training_report.table(result), flush=True)
    if is_first:
        _write(benchmark, options, device, about, results)
    raw.Barrier()
    raw.Free()
    # Gloo's threads must end before the interpreter does.
    dist.destroy_process_group()


def _write(
    benchmark: str,
    options: argparse.Namespace,
    device: torch.device,
    about: dict[str, Any],
    results: list[dict[str, Any]],
) -> None:
    """Write the record to a file named by library, ranks, device, link and cap."""
    record = {
        "benchmark": benchmark,
        "link": options.link,
        "environment": about,
        "bucket_cap_mb": options.bucket_cap_mb,
        "rounds": options.rounds,
        # A wrong result ends the run with an error before this line.
        "results_checked": True,
        "results": results,
    }
    on = "" if device.type == "cpu" else devices.name_of(device)
    library = environment.library_name(about)
    parts = [benchmark, library, str(about["ranks"]), on, options.link, options.suffix]
    training_report.write(record, options.output / f"{'-'.join(filter(None, parts))}.json")


def arguments(
    description: str, models: Sequence[str], rounds: int, bucket_cap_mb: float | None
) -> argparse.Namespace:
    """Parse the command line; a cap other than the default becomes part of the file's name."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--models", nargs="+", default=models, metavar="NAME:BATCH", help=", ".join(cases.MODELS)
    )
    parser.add_argument("--rounds", type=int, default=rounds)
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
    benchmark_options.add_link(parser)
    benchmark_options.add_output(parser, "JSON and the plot")
    options = parser.parse_args()
    options.suffix = (
        "" if options.bucket_cap_mb == bucket_cap_mb else f"cap{options.bucket_cap_mb:g}"
    )
    return options
