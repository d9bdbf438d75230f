"""Time training steps of torch's DDP on NCCL and on mpidist, and of mpidist's DDP, in turns.

python benchmarks/bench_ddp_nccl.py --device cuda                      (one rank: the host's part)
mpirun --bind-to none -n 2 python benchmarks/bench_ddp_nccl.py         (a device for each rank)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from harness import benchmark_options, devices, report, timing
from harness.goals import Goal, judge
from harness.job import Job
from training import cases

BARE, OURS, TORCHS = "bare", "mpidist", "torch on mpidist"
_FARTHEST = 1e-5
_ROUNDS, _BURST_S = 15, 0.05


def main() -> None:
    options = _arguments()
    device = devices.chosen(options.device)
    with Job(least=1, uses_torch=True, device=device) as job:
        size = job.group.size
        if device.type == "cuda" and torch.cuda.device_count() < size:
            raise SystemExit(
                f"{size} ranks, {torch.cuda.device_count()} device(s): NCCL takes one rank a device"
            )
        timing.touch_memory()
        library = "nccl" if device.type == "cuda" else "gloo"
        peer = dist.new_group(backend=library)
        results = []
        for words in options.models:
            name, _, batch = words.partition(":")
            model = cases.MODELS[name](int(batch or 64)).on(device)
            results.append(measure(job.raw, options, model, library, peer))
            if job.is_first:
                print(f"{model.name}\n{report.table(results[-1:])}\n", flush=True)
        if job.is_first:
            fields = {
                "peer": library,
                "rounds": options.rounds,
                "burst_s": options.burst_s,
                "results": results,
            }
            verdicts = judge(results, goals(library))
            job.write(options.output, "ddp-nccl", fields, verdicts, [devices.name_of(device)])


def goals(library: str) -> tuple[Goal, ...]:
    """Return the bound of torch's DDP on mpidist against the same on NCCL, or on its stand-in."""
    text = f"torch's DDP: its step on mpidist over that on {library} ≤ 1.1"
    peer = f"torch on {library}"
    return (Goal(text, "step", TORCHS, peer, "ratio_of_rounds", 1.1, False, lambda bytes_: True),)


def measure(
    raw: Any, options: argparse.Namespace, model: cases.Model, library: str, peer: Any
) -> dict[str, Any]:
    """Check and time the steps of one model. Collective.

    Raises:
        RuntimeError: Gradients differ; on this rank.
    """
    batch = cases.own_batch(model)
    wrapped = {
        f"torch on {library}": cases.theirs(model, peer),
        TORCHS: cases.theirs(model, None),
        OURS: cases.ours(model),
    }
    contenders = [cases.contender(name, net, batch) for name, net in wrapped.items()]
    for one in contenders[1:]:
        far = cases.farthest(one, contenders[0])
        if far > _FARTHEST:
            raise RuntimeError(f"{model.name}: gradients of {one.name} are off by {far}")
    contenders.append(cases.contender(BARE, cases.build(model), batch))
    series = timing.time_rounds(raw, contenders, options.rounds, options.burst_s)
    numel = model.numel()
    return {"model": model.name} | report.result_of("step", numel, 4 * numel, series)


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "device", rounds=_ROUNDS, burst_s=_BURST_S)
    parser.add_argument("--models", nargs="+", default=["many:64", "mlp:64", "resnet18:64"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
