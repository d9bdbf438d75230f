"""Job of two ranks that times one source tree of mpidist; ``compare_trees.py`` starts it.

``PYTHONPATH`` names the tree. The cases use only public names of mpidist, so that all trees run
the same measuring code. Contenders that do not use mpidist run, too: the control.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mpidist
import mpidist.comm
from collectives import cases as collective_cases
from harness import benchmark_options, environment, timing
from mpidist.ddp import noop_hook
from rpc import cases as rpc_cases
from rpc import run as rpc_run
from rpc import workers as rpc_workers
from training import cases as training_cases

_KI, _MI = 1 << 10, 1 << 20
_WRONG = 1e-4  # of the largest gradient


@dataclass(frozen=True)
class Settings:
    """Sizes, models, and repetitions of the measurements."""

    sizes_bytes: tuple[int, ...] = (8, _KI, 16 * _KI, 256 * _KI, 4 * _MI)
    models: tuple[tuple[str, int], ...] = (
        ("many", 2),
        ("many", 256),
        ("mlp", 64),
        ("transformer", 8),
    )
    asynchronous: int = 500  # calls under way
    rounds: int = 7
    burst_s: float = 0.005
    long_burst_s: float = 0.02  # of steps and calls


QUICK = Settings((8, 64 * _KI), (("many", 2),), 20, 1, 0.001, 0.001)

Row = tuple[str, int, bool, timing.Series]  # operation, bytes, whether a control, its series


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("mpidist")
    # mpidist prepares the MPI library before the import of mpi4py.MPI starts MPI.
    from mpi4py import MPI

    raw = MPI.COMM_WORLD.Dup()
    about = environment.describe(raw)
    timing.touch_memory()
    settings = QUICK if options.quick else Settings()
    settings = replace(settings, rounds=options.rounds or settings.rounds)
    rows = list(_BENCHMARKS[options.benchmark](raw, MPI, settings))
    if raw.Get_rank() == 0:
        record = {
            # compare_trees.py checks this path, and does not record it.
            "tree": str(Path(mpidist.__file__).resolve().parents[1]),
            "environment": about,
            "rows": [
                {
                    "benchmark": options.benchmark,
                    "operation": operation,
                    "size_bytes": size_bytes,
                    "contender": series.name,
                    "is_control": is_control,
                    "median_us": series.median_us,
                }
                for operation, size_bytes, is_control, series in rows
            ],
        }
        (options.output / f"tree-{options.benchmark}.json").write_text(
            json.dumps(record), encoding="utf-8"
        )
    raw.Barrier()
    raw.Free()
    dist.destroy_process_group()


def _collectives(raw: Any, mpi: Any, settings: Settings) -> Iterator[Row]:
    """Check and time every collective through torch and natively; mpi4py is the control."""
    # Gloo's contenders are built on the default group, and dropped.
    ways = collective_cases.Ways(None, raw, mpidist.comm.init(), mpi)
    for operation in collective_cases.OPERATIONS:
        for make in collective_cases.cases_of(operation, ways, settings.sizes_bytes):
            case = make()
            case.contenders = [
                one for one in case.contenders if one.name in ("mpi4py", "mpidist", "native")
            ]
            _require_right(operation, case.wrong(ways))
            case.zero()
            for series in timing.time_rounds(
                raw, case.contenders, settings.rounds, settings.burst_s
            ):
                yield operation, case.size_bytes, series.name == "mpi4py", series


def _ddp(raw: Any, mpi: Any, settings: Settings) -> Iterator[Row]:
    """Check and time training steps; the step without DDP is the control."""
    ours = training_cases.ours
    for name, batch_size in settings.models:
        model = training_cases.MODELS[name](batch_size)
        batch = training_cases.own_batch(model)
        copies = {"gradient_as_bucket_view": False}
        ways = {
            "bare": partial(training_cases.build, model),
            "noop_hook": partial(ours, model, None, noop_hook),
            "noop_hook, copies": partial(ours, model, None, noop_hook, **copies),
            "mpidist": partial(ours, model),
            "mpidist, copies": partial(ours, model, **copies),
        }
        contenders = [
            training_cases.contender(label, build(), batch) for label, build in ways.items()
        ]
        right, copied = contenders[-2:]
        if training_cases.farthest(copied, right) > _WRONG:
            _require_right(model.name, [copied.name])
        for series in timing.time_rounds(raw, contenders, settings.rounds, settings.long_burst_s):
            yield model.name, 4 * model.numel(), series.name == "bare", series


def _rpc(raw: Any, mpi: Any, settings: Settings) -> Iterator[Row]:
    """Check and time calls, in one block per contender; the floor over mpi4py is the control."""
    group = mpidist.comm.init()
    calls = rpc_run.Settings(
        tuple(size for size in settings.sizes_bytes if size >= _KI),
        many=(1, 10, 100),
        burst=settings.asynchronous,
        rounds=settings.rounds,
        burst_s=settings.long_burst_s,
    )
    cases = rpc_cases.cases(calls.sizes_bytes, calls.burst, group.size - 1, calls.many)
    names = ["mpidist", rpc_workers.DATA_ONLY]
    run = rpc_run.Run(mpi.COMM_SELF, calls, cases, names, measures_threads=False)
    rpc_run.floor_block(raw, run)
    for name in names:
        rpc_run.contender_block(name, group, run)
    if group.rank:
        return
    controls = {"no-op": "floor", "echo": "ping-pong"}
    for case in cases:
        for series in run.series_of(case):
            is_control = series.name == controls.get(case.operation)
            if is_control or series.name in names:
                yield case.operation, case.size_bytes, is_control, series


_BENCHMARKS = {"collectives": _collectives, "ddp": _ddp, "rpc": _rpc}


def _require_right(operation: str, wrong: list[str]) -> None:
    if wrong:
        raise RuntimeError(f"{operation}: wrong result of {', '.join(wrong)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=tuple(_BENCHMARKS))
    parser.add_argument("--rounds", type=int, help="of each case")
    benchmark_options.add(parser, "quick")
    parser.add_argument("--output", type=Path, required=True, help="folder of the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
