"""State of the sharded optimizer: consolidation, and its memory.

mpirun --bind-to none -n 2 python benchmarks/bench_oss_state.py

Adam over a perceptron of 8.4 M parameters, with one torch thread per rank, against FairScale's OSS
on Gloo, in turns. Without fairscale its rows are missing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness import benchmark_options, process_memory
from harness.job import Job
from mpidist.zero.optimizer import OSS
from optimizer.cases import mlp
from optimizer.state_report import goals, show


class Model:
    """Perceptron with an optimizer.

    Args:
        make: Builds the optimizer of the parameters.
    """

    def __init__(self, make: Callable[[Any], Any], width: int, batch: int) -> None:
        self.module = mlp(8, width)
        self.optimizer = make(self.module.parameters())
        self._inputs = torch.randn(batch, width)

    def step(self) -> None:
        """Compute gradients, the same on all ranks, and step."""
        self.optimizer.zero_grad()
        self.module(self._inputs).square().mean().backward()
        self.optimizer.step()


def main() -> None:
    parser = benchmark_options.parser(__doc__, "quick", rounds=7)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    if options.quick:
        options.width, options.batch, options.rounds = 64, 4, 2
    with Job(least=1) as job:
        group, rounds = job.group, options.rounds
        model = Model(
            lambda params: OSS(params, torch.optim.Adam, group, lr=1e-3),
            options.width,
            options.batch,
        )
        fairscale = _fairscale(group, options)
        for one in (model, fairscale):
            if one is not None:
                for _ in range(2):
                    one.step()
        fields = {
            "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
            "batch": options.batch,
            "rounds": rounds,
            "consolidation_ms": consolidation(group, model, fairscale, rounds),
            "memory_mib": memory(group, model),
        }
        check(group, model, fairscale)
        fields["goals"] = goals(fields)
        if job.is_first:
            show(fields, group.size)
            job.write(options.output, "oss-state", fields)


def _fairscale(group: Any, options: argparse.Namespace) -> Model | None:
    try:
        from fairscale.optim import OSS as Other
    except ImportError:
        return None
    if group.size == 1:
        return None
    if not dist.is_initialized():
        dist.init_process_group("mpidist")
    gloo = dist.new_group(backend="gloo")
    return Model(
        lambda params: Other(params, optim=torch.optim.Adam, group=gloo, lr=1e-3),
        options.width,
        options.batch,
    )


def consolidation(
    group: Any, model: Model, fairscale: Model | None, rounds: int
) -> dict[str, list[float]]:
    """Return each way's times in milliseconds, of the slowest rank in each round."""
    optimizer = model.optimizer
    held: list[Any] = []

    def fresh() -> None:
        # The held result keeps its memory, so that the next one cannot reuse it.
        held.append(optimizer.state_dict() if group.rank == 0 else None)

    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "used again": (lambda: None, lambda: optimizer.consolidate_state_dict(0)),
        "fresh": (fresh, lambda: optimizer.consolidate_state_dict(0)),
        "all ranks": (lambda: None, lambda: optimizer.consolidate_state_dict(-1)),
    }
    if fairscale is not None:
        ways["FairScale on Gloo"] = (
            lambda: None,
            lambda: fairscale.optimizer.consolidate_state_dict(0),
        )
    optimizer.consolidate_state_dict(0)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (prepare, call) in ways.items():
            prepare()
            times[name].append(timed(group, call))
            held.clear()
    return {name: values[1:] for name, values in times.items()}


def memory(group: Any, model: Model) -> dict[str, Any]:
    """Return the MiB that a consolidation adds to each rank's peak memory; None if unknown."""
    optimizer = model.optimizer
    own = sum(flat.nbytes for flat in optimizer.rank_local_state_dict(copies=False)["flats"])
    added: dict[str, list[Any]] = {}
    for name, recipient in (("to rank 0", 0), ("to all ranks", -1)):
        # Rank 0 allocates new memory.
        held = optimizer.state_dict() if group.rank == 0 else None
        group.barrier()
        before = process_memory.resident_mib() if process_memory.reset_peak() else None
        optimizer.consolidate_state_dict(recipient)
        peak = process_memory.peak_mib()
        del held
        added[name] = group.all_gather_object(None if before is None else round(peak - before, 1))
        optimizer.consolidate_state_dict(0)
    return {
        "state of each rank": [round(one / 2**20, 1) for one in group.all_gather_object(own)],
        **added,
    }


def check(group: Any, model: Model, fairscale: Model | None) -> None:
    """Compare the consolidated state with the ranks' state.

    Raises:
        RuntimeError: The states differ.
    """
    now = model.optimizer.state_dict(all_ranks=True)
    for piece in model.optimizer._shards.pieces:
        for name, value in model.optimizer.optim.state[piece.tensor].items():
            if not torch.equal(now["state"][piece.number][name], value):
                raise RuntimeError(
                    f"{name} of parameter {piece.number} is wrong on rank {group.rank}"
                )
    if fairscale is not None and group.rank == 0:
        theirs = fairscale.optimizer.state_dict()
        if {key: list(value) for key, value in theirs["state"].items()} != {
            key: list(v) for key, v in now["state"].items()
        }:
            raise RuntimeError("FairScale's state dict has other names")


def timed(group: Any, call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call on the slowest rank."""
    group.barrier()
    start = time.perf_counter()
    call()
    passed = torch.tensor([1e3 * (time.perf_counter() - start)], dtype=torch.float64)
    group.all_reduce(passed, "max")
    return float(passed)


if __name__ == "__main__":
    main()
