"""Measurement of all-reduces of device memory, for tuning tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch

from mpidist.comm.algorithms import device_all_reduce, ring, tuning
from mpidist.comm.algorithms.reduce_op import SUM
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Device, HostDevice, device_at
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI

_DTYPE = torch.float32


def seconds(
    comm: Communicator,
    where: torch.device,
    sizes: Sequence[int],
    rounds: int,
    log: Callable[[str], object] = lambda line: None,
) -> dict[int, dict[str, float]]:
    """Time each able algorithm at each size; return medians of the slowest rank's seconds.

    Collective: over ``comm``, with the same arguments on all ranks.

    Args:
        comm: The group's communicator.
        where: The device; the CPU for a dry run.
        sizes: Bytes of a tensor.
        rounds: Calls of each algorithm, in turn, after a warm-up call.
        log: Called with a line of text for each size.
    """
    device: Device = device_at(where) or HostDevice()
    measured: dict[int, dict[str, float]] = {}
    for nbytes in sizes:
        flat = torch.zeros(nbytes // _DTYPE.itemsize, dtype=_DTYPE, device=where)
        calls = _calls(comm, device, where, flat)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                elapsed_s = once(comm, call)
                if turn:
                    times[name].append(elapsed_s)
        measured[nbytes] = {name: median(taken) for name, taken in times.items()}
        times_text = [f"{name} {1e6 * s:.0f} us" for name, s in measured[nbytes].items()]
        log(tuning.line_of(f"{nbytes:>11} B", times_text))
    return measured


def _calls(
    comm: Communicator, device: Device, where: torch.device, flat: torch.Tensor
) -> dict[str, Callable[[], None]]:
    def run(all_reduce: Callable[..., None]) -> None:
        with device.as_current():
            fence = StreamFence(device, (flat,))
            fence.wait_ready()
            fence.synchronize()
            all_reduce(comm, fence, flat, SUM)
            for event in fence.record():
                event.synchronize()

    calls: dict[str, Callable[[], None]] = {}
    for name in device_all_reduce.able_algorithms(comm, _DTYPE, SUM, where):
        if name == tuning.RING:
            rings = tuning.rings_for(flat.nbytes, comm.size)
            calls |= {
                label: partial(run, partial(ring.all_reduce, chunk_bytes=chunk))
                for label, chunk in rings.items()
            }
        else:
            calls[name] = partial(run, device_all_reduce.ALGORITHMS[name])
    return calls


def once(comm: Communicator, call: Callable[[], None]) -> float:
    """Return the duration of a collective call on the slowest rank, in seconds.

    Collective: over ``comm``.
    """
    comm.mpi.Barrier()
    start = time.perf_counter()
    call()
    slowest_s = np.array([time.perf_counter() - start])
    comm.mpi.Allreduce(MPI.IN_PLACE, slowest_s, MPI.MAX)
    return float(slowest_s[0])


def measured_table(
    comm: Communicator,
    where: torch.device,
    measured: dict[int, dict[str, float]],
    source: str,
    log: Callable[[str], object] = lambda line: None,
) -> tuning.Table:
    """Return the table of measured times; use it in this job, and cache it for later ones.

    A table of the CPU, of a dry run, is not cached: it would say nothing about a device.

    Collective: over ``comm``.
    """
    table = tuning.table_of(measured, source)
    if where.type == "cpu":
        if comm.rank == 0:
            log("not kept for later jobs: measured on the CPU, which shows only that it runs")
    elif comm.rank == 0:
        is_kept = tuning.store(comm, where, table)
        log(
            "kept for later jobs"
            if is_kept
            else "not kept: MPIDIST_CACHE, or the user's cache folder, cannot be written"
        )
    comm.tuning_tables[where.type] = table
    return table
