"""Compare a step of mpidist's DDP with one of torch's DDP, on Gloo and on mpidist's backend, and with one without communication.

mpirun --bind-to none -n 2 python benchmarks/bench_ddp.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import environment
import timing
import torch
import torch.distributed as dist
import training_cases as cases
import training_report

from mpidist.ddp import noop_hook

_WRONG = 1e-4  # of the largest gradient: sums in another order differ by less


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("mpidist")
    gloo = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
    # Only now: mpidist prepares the MPI library before it starts, and importing this module would start it.
    from mpi4py import MPI

    raw = MPI.COMM_WORLD.Dup()
    about = environment.describe(raw)
    is_first = raw.Get_rank() == 0
    timing.touch_memory()
    results = []
    for model in [cases.MODELS[name](int(size)) for name, size in (text.split(":") for text in options.models)]:
        series = measure(raw, model, gloo, options.rounds, options.bucket_cap_mb)
        results.append(training_report.result_of(model, series, "bare"))
        if is_first:
            print(training_report.table(results[-1]), flush=True)
    if is_first:
        record = {
            "benchmark": "ddp",
            "link": options.link,
            "environment": about,
            "bucket_cap_mb": options.bucket_cap_mb,
            "rounds": options.rounds,
            "results_checked": True,  # or measure() had raised
            "results": results,
        }
        settings = [f"cap{options.bucket_cap_mb:g}"] if options.bucket_cap_mb else []
        name = "-".join(["ddp", environment.library_name(about), str(about["ranks"]), *filter(None, [options.link]), *settings])
        path = options.output / f"{name}.json"
        training_report.write(record, path)
    raw.Barrier()
    raw.Free()
    dist.destroy_process_group()  # Gloo's threads must be gone before the interpreter goes


def measure(raw: Any, model: cases.Model, gloo: Any, rounds: int, cap: float | None) -> Sequence[timing.Series]:
    """Check and time the ways to train one model, all with the same buckets. Collective over all ranks.

    Raises:
        RuntimeError: A contender's gradients are wrong; on this rank.
    """
    batch = cases.own_batch(model)
    ways: dict[str, Callable[[], torch.nn.Module]] = {
        "bare": lambda: cases.build(model),
        "bare, zeroed": lambda: cases.build(model),
        "noop_hook": lambda: cases.ours(model, None, noop_hook, bucket_cap_mb=cap),
        "noop_hook, zeroed": lambda: cases.ours(model, None, noop_hook, bucket_cap_mb=cap),
        "mpidist": lambda: cases.ours(model, bucket_cap_mb=cap),
        "mpidist, zeroed": lambda: cases.ours(model, bucket_cap_mb=cap),
        "torch on mpidist": lambda: cases.theirs(model, None, bucket_cap_mb=cap),
        "torch on Gloo": lambda: cases.theirs(model, gloo, bucket_cap_mb=cap),
    }
    if gloo is None:
        del ways["torch on Gloo"]
    contenders = [cases.contender(name, build(), batch, not name.endswith("zeroed")) for name, build in ways.items()]
    by_name = {one.name: one for one in contenders}
    for name in ("mpidist, zeroed", "torch on mpidist", *(["torch on Gloo"] if gloo is not None else [])):
        distance = cases.farthest(by_name[name], by_name["mpidist"])
        if distance > _WRONG:
            raise RuntimeError(f"{model.name}: the gradients of {name} differ from mpidist's by {distance:.1e}")
    contenders.append(_communication_alone(by_name["mpidist"]))
    return timing.time_rounds(raw, contenders, rounds, 0.02)


def _communication_alone(trained: timing.Contender) -> timing.Contender:
    """Return the all-reduce of all gradients in one piece: what a step would wait for if it could hide nothing."""
    flat = torch.zeros(sum(t.numel() for t in trained.outputs))
    return timing.Contender("communication alone", (lambda: dist.all_reduce(flat),), (flat,))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ["mlp:64", "mlp:256", "many:256", "resnet18:8", "transformer:8"]
    parser.add_argument("--models", nargs="+", default=models, metavar="NAME:BATCH", help=", ".join(cases.MODELS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--bucket-cap-mb", type=float, help="of all contenders; torch's default, 25, if not given")
    parser.add_argument("--link", default=os.environ.get("MPIDIST_LINK", ""), help="name of the network, for the record")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON and the plot")
    return parser.parse_args()


if __name__ == "__main__":
    main()
