"""Facts and checks that need MPI: its start, its capabilities, and small test operations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from mpidist.cli import facts as process_facts
from mpidist.cli import first_program
from mpidist.cli.facts import Device, Facts
from mpidist.cli.mpi_facts import MpiFacts
from mpidist.comm.algorithms import shared_memory
from mpidist.comm.discovery import capability
from mpidist.comm.discovery.installed import Installed
from mpidist.comm.discovery.transports import Transports, transports
from mpidist.comm.group import ProcessGroup
from mpidist.comm.group_types import Group
from mpidist.comm.mpi import byte_strings, runtime
from mpidist.comm.serialization import frame
from mpidist.comm.subgroups import ENV_ON_TIMEOUT
from mpidist.comm.world_group import from_world
from mpidist.errors import MpidistError

NOT_TRIED = "not tried"
_NUMEL = 1000
# Some milliseconds each on a core; the shortest of them is not disturbed by other processes.
_SIDE, _PRODUCTS = 512, 5


def start(timeout_s: float) -> runtime.World:
    """Start MPI.

    Collective: over the job.

    Raises:
        LaunchError: MPI cannot connect the ranks as they were started, or there is no MPI.
        CommTimeout: Not all ranks started MPI in time.
    """
    return runtime.world(timeout_s)


def ask(facts: Facts, library: Installed) -> Facts:
    """Return this rank's facts with those of MPI and CUDA added. Local; after ``start``."""
    world, found = runtime.world(), capability.capabilities()
    mpi = MpiFacts(
        library=found.library,
        abi=library.abi,
        file=library.file,
        mpirun=library.mpirun,
        standard=".".join(map(str, found.standard)),
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        nodes=world.nodes,
        survives_failures=found.survives_failures,
        cuda_aware=found.cuda_aware,
        cuda_source=found.cuda_source,
        rocm_aware=found.rocm_aware,
        rocm_source=found.rocm_source,
        cuda_before_mpi=found.cuda_before_mpi,
        operations=dict(found.operations),
        transports=transports(library.text),
    )
    return replace(process_facts.with_device(facts, runtime.device()), rank=world.rank, mpi=mpi)


def try_device_operations() -> None:
    """Try each operation on device memory in a separate job, and cache the results.

    Local: in a job of one. Blocks: for seconds to minutes, the first time on a machine.
    """
    capability.try_operations(runtime.device())


def gather(facts: Facts) -> list[Facts]:
    """Return the facts of all ranks, by rank, on every rank. Collective: over the job."""
    encoded = bytes(frame.to_bytes(asdict(facts), data_only=True))
    every = byte_strings.gathered(runtime.world().comm, encoded)
    return [_facts(frame.from_bytes(data, data_only=True)) for data in every]


def _facts(fields: dict[str, Any]) -> Facts:
    mpi, device = fields["mpi"], fields["device"]
    if mpi is not None:
        mpi = MpiFacts(**{**mpi, "transports": Transports(**mpi["transports"])})
    return Facts(**{**fields, "mpi": mpi, "device": None if device is None else Device(**device)})


def trial_group(timeout_s: float) -> ProcessGroup:
    """Create a group of all ranks whose calls raise on a timeout. Collective: over the job."""
    return from_world("doctor", timeout_s, on_timeout="raise")


def with_operations(facts: Facts) -> Facts:
    """Return the facts with the current results of operations on device memory. Local."""
    assert facts.mpi is not None
    operations = dict(capability.capabilities().operations)
    return replace(facts, mpi=replace(facts.mpi, operations=operations))


def clock(group: Group) -> float:
    """Return this rank's clock after a barrier: seconds since 1970. Collective: over the group.

    0.0 if the group has failed; then no clock says anything.
    """
    try:
        group.barrier()
    except (MpidistError, RuntimeError):
        return 0.0
    return time.time()


def computing_time(group: Group) -> float:
    """Return the shortest time of one matrix product, in seconds. Collective: over the group.

    All ranks compute at once, as they do in training. 0.0 if the group has failed.
    """
    left = torch.rand(_SIDE, _SIDE, device="cpu")
    try:
        group.barrier()
    except (MpidistError, RuntimeError):
        return 0.0
    times = []
    for _ in range(_PRODUCTS):
        begun = time.perf_counter()
        torch.mm(left, left)
        times.append(time.perf_counter() - begun)
    return min(times)


def check(group: Group, timeout_s: float = 20.0) -> dict[str, str]:
    """Run one small operation of each kind and check the result.

    Collective: over the group, whose calls must raise on a timeout.

    Args:
        group: All ranks of the job.
        timeout_s: Limit in seconds of operations of torch's own group.

    Returns:
        By name, "" or this rank's error. After an exception the remaining operations are "not
        tried", because the group has failed or the ranks are out of step.
    """
    results: dict[str, str] = {}
    has_failed = False
    for name, call in _checks(group, timeout_s):
        try:
            results[name] = NOT_TRIED if has_failed else call()
        # Versions of torch that were not tested may raise anything.
        except Exception as error:
            results[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            has_failed = True
    return results


def _checks(group: Group, timeout_s: float) -> Sequence[tuple[str, Callable[[], str]]]:
    own = runtime.device()
    ranks = range(group.size)
    total, highest = sum(rank + 1 for rank in ranks), group.size

    def reduces(
        dtype: torch.dtype, op: str, expected: float, device: str = "cpu", async_op: bool = False
    ) -> Callable[[], str]:
        def call() -> str:
            tensor = torch.full((_NUMEL,), group.rank + 1, dtype=dtype, device=device)
            work = group.all_reduce(tensor, op, async_op)
            if work is not None:
                work.wait()
            return _compared(tensor, expected)

        return call

    def gathers() -> str:
        found = group.all_gather_object({"rank": group.rank})
        return "" if found == [{"rank": rank} for rank in ranks] else f"got {found}"

    found: list[tuple[str, Callable[[], str]]] = [
        ("all_reduce fp32 sum", reduces(torch.float32, "sum", total)),
        ("all_reduce bf16 average", reduces(torch.bfloat16, "avg", total / group.size)),
        ("all_reduce int64 max", reduces(torch.int64, "max", highest)),
        ("all_reduce fp32, asynchronous", reduces(torch.float32, "sum", total, async_op=True)),
        ("all_gather of objects", gathers),
        ("average in memory of the node", lambda: _average_in_node_memory(group)),
    ]
    found.append(("init_process_group and all_reduce", lambda: _first_program(timeout_s)))
    if own.type == "cuda":
        call = reduces(torch.float32, "sum", total, str(own))
        found.append((f"all_reduce fp32 sum on {own.type}", call))
    return found


def _first_program(timeout_s: float) -> str:
    # A rank that does not come must not end the doctor before its report.
    former = os.environ.get(ENV_ON_TIMEOUT)
    os.environ[ENV_ON_TIMEOUT] = "raise"
    try:
        return first_program.all_reduce(timeout_s)
    finally:
        if former is None:
            del os.environ[ENV_ON_TIMEOUT]
        else:
            os.environ[ENV_ON_TIMEOUT] = former


def _average_in_node_memory(group: Group) -> str:
    node = group.split_by_node()
    try:
        memory = shared_memory.share(node, 4 * _NUMEL)
        if memory is None:
            return ""
        tensor = memory.tensor(0, _NUMEL, torch.float32)
        tensor.own.fill_(group.rank + 1)
        tensor.average()
        mine = [rank + 1 for rank in node.world_ranks]
        return _compared(tensor.own, sum(mine) / len(mine))
    finally:
        node.close()


def shares_node_memory(group: Group) -> bool | None:
    """Return whether the ranks of this node map each other's memory; None for a single rank.

    Collective: over the group.
    """
    node = group.split_by_node()
    try:
        return None if node.size == 1 else shared_memory.share(node, 4096) is not None
    finally:
        node.close()


def _compared(tensor: torch.Tensor, expected: float) -> str:
    # bf16 rounds the average; all other results are exact.
    wrong = (tensor.double() - expected).abs().max().item()
    return "" if wrong <= 2**-7 * expected else f"expected {expected:g}, got {tensor[0].item():g}"
