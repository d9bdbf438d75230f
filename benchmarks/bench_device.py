"""Time transfers of device tensors: device pointers, mpidist's ring, and staging through the host.

mpirun --bind-to none -n 2 python benchmarks/bench_device.py --device cuda
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import benchmark_options
import collective_goals
import devices
import environment
import report
import timing
import torch
from collective_goals import Goal
from timing import Contender

from mpidist.comm import SUM
from mpidist.comm.algorithms import device_all_reduce, tuning
from mpidist.comm.algorithms.host_copies import HostCopies
from mpidist.comm.discovery import capability
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Device, HostDevice, device_of
from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.communicator import Communicator

Tensor = torch.Tensor

_KI, _MI = 1 << 10, 1 << 20
_TAG = 1


def _ahead(operation: str, name: str) -> Goal:
    text = f"{operation} from 1 MiB: time of staged over {name} ≥ 1"
    return Goal(
        text, operation, "staged", name, "ratio_of_rounds", 1.0, True, lambda size: size >= _MI
    )


GOALS = (
    _ahead("ping_pong", "library"),
    _ahead("all_reduce", "library"),
    _ahead("all_reduce", "ring"),
)


@dataclass(frozen=True)
class Settings:
    """Sizes, and repetitions of the measurements."""

    sizes_bytes: tuple[int, ...] = (
        4 * _KI,
        16 * _KI,
        64 * _KI,
        256 * _KI,
        1 * _MI,
        4 * _MI,
        16 * _MI,
        64 * _MI,
    )
    rounds: int = 11
    burst_s: float = 0.01


QUICK = Settings((4 * _KI, 1 * _MI), 2, 0.001)


@dataclass(frozen=True)
class Place:
    """This rank, its device, and MPI's abilities on that device."""

    comm: Communicator
    device: torch.device
    # The device as mpidist.comm represents it.
    queues: Device
    # MPI operations that accept device memory.
    able: frozenset[str]

    def contribution(self, numel: int, rank: int) -> Tensor:
        """Return a rank's contribution, in values whose sum is exact."""
        return (torch.arange(numel, device=self.device) % 1000 + rank).float()


# --- all-reduce ---


def all_reduce(place: Place, numel: int) -> list[Contender]:
    """Return the available all-reduce algorithms, on one tensor."""
    tensor = torch.zeros(numel, device=place.device)
    kind = (tensor.dtype, tensor.nbytes, SUM, place.device)
    able = device_all_reduce.able_algorithms(place.comm, tensor.dtype, SUM, place.device)
    calls = {
        name: partial(_reduced, place, device_all_reduce.algorithm(place.comm, *kind, name), tensor)
        for name in able
    }
    return [Contender(name, (call,), (tensor,)) for name, call in calls.items()]


def _reduced(place: Place, reduce: Callable[..., None], tensor: Tensor) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    reduce(place.comm, fence, tensor, SUM)
    _finish(fence)


def is_sum(place: Place, contender: Contender) -> bool:
    """Return whether an all-reduce yields the sum of all contributions."""
    (tensor,) = contender.outputs
    tensor.copy_(place.contribution(tensor.numel(), place.comm.rank))
    contender.calls[0]()
    truth = torch.stack(
        [place.contribution(tensor.numel(), rank) for rank in range(place.comm.size)]
    ).sum(0)
    return torch.equal(tensor, truth)


# --- ping-pong ---


def ping_pong(place: Place, numel: int) -> list[Contender]:
    """Send from rank 0 to rank 1 and back; a call is one way."""
    out, back = place.contribution(numel, 7), torch.zeros(numel, device=place.device)
    ways = {tuning.LIBRARY: (_send, _receive), tuning.STAGED: (_send_staged, _receive_staged)}
    if "point_to_point" not in place.able:
        del ways[tuning.LIBRARY]
    contenders = []
    for name, (send, receive) in ways.items():
        calls: tuple[Callable[[], object], ...] = ()
        if place.comm.rank == 0:
            calls = partial(send, place, out, 1), partial(receive, place, back, 1)
        elif place.comm.rank == 1:
            calls = partial(receive, place, back, 0), partial(send, place, back, 0)
        contenders.append(Contender(name, calls, (back,)))
    return contenders


def _send(place: Place, tensor: Tensor, peer: int) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    fence.synchronize()
    place.comm.mpi.Send(buffer.as_bytes(tensor), peer, _TAG)


def _receive(place: Place, tensor: Tensor, peer: int) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    fence.synchronize()
    place.comm.mpi.Recv(buffer.as_bytes(tensor), peer, _TAG)


def _send_staged(place: Place, tensor: Tensor, peer: int) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    (host,), _ = HostCopies((tensor,), (), fence).load()
    place.comm.mpi.Send(buffer.as_bytes(host), peer, _TAG)


def _receive_staged(place: Place, tensor: Tensor, peer: int) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    copies = HostCopies((), (tensor,), fence)
    _, (host,) = copies.load()
    place.comm.mpi.Recv(buffer.as_bytes(host), peer, _TAG)
    copies.store()
    _finish(fence)


def _finish(fence: StreamFence) -> None:
    for event in fence.record():
        event.synchronize()


def is_back(place: Place, contender: Contender) -> bool:
    """Return whether the message returns unchanged."""
    (back,) = contender.outputs
    back.fill_(-1)
    for call in contender.calls:
        call()
    return place.comm.rank > 1 or torch.equal(back, place.contribution(back.numel(), 7))


# --- the run ---


_OPERATIONS: dict[
    str, tuple[Callable[[Place, int], list[Contender]], Callable[[Place, Contender], bool]]
] = {
    "all_reduce": (all_reduce, is_sum),
    "ping_pong": (ping_pong, is_back),
}


def main() -> None:
    options = _arguments()
    settings = QUICK if options.quick else Settings()
    torch.set_num_threads(1)
    device = devices.chosen(options.device)
    if options.device == "cpu":
        # Any MPI accepts host memory in all operations.
        os.environ["MPIDIST_CUDA_AWARE"] = "1"
    world = runtime.world()
    if world.size < 2:
        raise SystemExit(
            "start at least 2 ranks: mpirun --bind-to none -n 2 python benchmarks/bench_device.py"
        )
    raw = world.comm.Dup()
    about = environment.describe(raw, device)
    place = _place(Communicator(raw, world.nodes, world.highest_tag).blocking(), device)
    capabilities = capability.capabilities()
    is_first = world.rank == 0
    if is_first:
        print(
            f"{environment.processor(about)}, {about['mpi_library']}, CUDA-aware: "
            f"{capabilities.cuda_aware} ({capabilities.cuda_source})"
        )
    results = []
    for operation in _OPERATIONS:
        rows = list(measure(operation, place, settings))
        results += rows
        if is_first:
            print(f"\n{operation}\n{report.table(rows)}", flush=True)
    if is_first:
        _write(options.output, about, settings, place, capabilities, results)
    raw.Barrier()


def _place(comm: Communicator, device: torch.device) -> Place:
    queues = device_of((torch.empty(0, device=device),)) or HostDevice()
    return Place(comm, device, queues, capability.agreed_operations(comm, device))


def measure(operation: str, place: Place, settings: Settings) -> Iterator[dict[str, Any]]:
    """Check and time one operation at each size.

    Collective: over all ranks.

    Raises:
        RuntimeError: A contender's result is wrong; on all ranks.
    """
    make, is_right = _OPERATIONS[operation]
    raw = place.comm.mpi
    for size_bytes in settings.sizes_bytes:
        contenders = make(place, size_bytes // 4)
        for contender in contenders:
            wrong = [
                rank
                for rank, right in enumerate(raw.allgather(is_right(place, contender)))
                if not right
            ]
            if wrong:
                raise RuntimeError(
                    f"{operation} of {size_bytes} bytes by {contender.name}: wrong result on ranks "
                    f"{wrong}"
                )
        for contender in contenders:
            # Repeated sums in place would overflow.
            contender.outputs[0].zero_()
        series = timing.time_rounds(raw, contenders, settings.rounds, settings.burst_s)
        yield report.result_of(operation, size_bytes // 4, size_bytes, series)


def _write(
    folder: Path,
    about: dict[str, Any],
    settings: Settings,
    place: Place,
    capabilities: capability.Capabilities,
    results: list[dict[str, Any]],
) -> None:
    verdicts = collective_goals.judge(results, GOALS)
    print(f"\n{report.goals_table(verdicts)}\n\noperations on this device's memory:")
    print("\n".join(f"  {name}: {words}" for name, words in capabilities.operations.items()))
    record = {
        "benchmark": "device",
        "environment": about,
        "rounds": settings.rounds,
        "burst_s": settings.burst_s,
        "cuda_aware": capabilities.cuda_aware,
        "cuda_source": capabilities.cuda_source,
        # Per operation, whether MPI accepts device memory, and why not.
        "operations": dict(capabilities.operations),
        # A wrong result ends the run with an error before this line.
        "results_checked": True,
        "results": results,
        "goals": verdicts,
    }
    parts = [
        "device",
        environment.library_name(about),
        str(about["ranks"]),
        devices.name_of(place.device),
    ]
    path = folder / f"{'-'.join(parts)}{'' if place.able else '-staged'}.json"
    report.write_json(record, path)
    report.draw(record, path.with_suffix(".png"))
    print(
        f"\nwritten to {folder.name}: {path.name} and {path.with_suffix('.png').name}", flush=True
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda",
        help="cpu: see that it runs, with the host as the device",
    )
    benchmark_options.add_output(parser, "JSON and the plot")
    benchmark_options.add_quick(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
