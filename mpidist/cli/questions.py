"""Facts and checks that need MPI: its start, its capabilities, and small test operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpidist.cli import facts as process_facts
from mpidist.cli.facts import Device, Facts
from mpidist.comm.algorithms import shared_memory
from mpidist.comm.discovery import capability
from mpidist.comm.discovery.installed import Installed
from mpidist.comm.discovery.transports import Transports, transports
from mpidist.comm.group import from_world
from mpidist.comm.mpi import byte_strings, runtime
from mpidist.comm.serialization import frame
from mpidist.errors import MpidistError

NOT_TRIED = "not tried"
_NUMEL = 1000


@dataclass(frozen=True)
class MpiFacts:
    """Facts about MPI on one rank.

    Attributes:
        library: First line of the library's version text.
        abi: ``openmpi`` or ``mpich``.
        file: Path of ``libmpi``.
        mpirun: Path of the library's launcher; "" if none was found.
        standard: Version of the MPI standard.
        thread_level: MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE.
        size: Number of ranks of the job.
        local_rank: Index on the node.
        local_size: Number of ranks on this node.
        nodes: Node number of each rank.
        survives_failures: ULFM is available and enabled.
        cuda_aware: The library takes device pointers; None if unknown.
        cuda_source: Source of this information.
        cuda_before_mpi: A CUDA context existed when MPI started; None if irrelevant.
        operations: Result of each operation on device memory, by name.
        transports: Known transports.
        shares_memory: The ranks of this node map each other's memory; None for a single rank, or
            if not tried.
    """

    library: str
    abi: str
    file: str
    mpirun: str
    standard: str
    thread_level: str
    size: int
    local_rank: int
    local_size: int
    nodes: tuple[int, ...]
    survives_failures: bool
    cuda_aware: bool | None
    cuda_source: str
    cuda_before_mpi: bool | None
    operations: dict[str, str]
    transports: Transports
    shares_memory: bool | None = None


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
        thread_level=found.thread_level,
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        nodes=world.nodes,
        survives_failures=found.survives_failures,
        cuda_aware=found.cuda_aware,
        cuda_source=found.cuda_source,
        cuda_before_mpi=found.cuda_before_mpi,
        operations=dict(found.operations),
        transports=transports(library.text),
    )
    return replace(process_facts.with_device(facts, runtime.device()), rank=world.rank, mpi=mpi)


def try_device_operations(group: Any) -> None:
    """Try each operation on device memory in a separate job, and cache the results.

    Collective: over the group.

    Blocks: for seconds to minutes, the first time on a machine.
    """
    device = runtime.device()
    if device.type == "cuda":
        capability.agreed_operations(group._comm, device)


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


def trial_group(timeout_s: float) -> Any:
    """Create a group of all ranks whose calls raise on a timeout. Collective: over the job."""
    return from_world("doctor", timeout_s, on_timeout="raise")


def with_operations(facts: Facts) -> Facts:
    """Return the facts with the current results of operations on device memory. Local."""
    return replace(
        facts, mpi=replace(facts.mpi, operations=dict(capability.capabilities().operations))
    )


def check(group: Any) -> dict[str, str]:
    """Run one small operation of each kind and check the result.

    Collective: over the group, whose calls must raise on a timeout.

    Returns:
        By name, "" or this rank's error. After an exception the remaining operations are "not
        tried", because the group has failed or the ranks are out of step.
    """
    results: dict[str, str] = {}
    has_failed = False
    for name, call in _checks(group):
        try:
            results[name] = NOT_TRIED if has_failed else call()
        except (MpidistError, RuntimeError, ValueError, OSError) as error:
            results[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            has_failed = True
    return results


def _checks(group: Any) -> Sequence[tuple[str, Callable[[], str]]]:
    import torch

    host, own = torch.device("cpu"), runtime.device()
    ranks = range(group.size)
    total, highest = sum(rank + 1 for rank in ranks), group.size

    def reduces(
        dtype: Any, op: str, expected: float, device: Any = host, **how: bool
    ) -> Callable[[], str]:
        def call() -> str:
            tensor = torch.full((_NUMEL,), group.rank + 1, dtype=dtype, device=device)
            work = group.all_reduce(tensor, op, **how)
            if how:
                work.wait()
            return _compared(tensor, expected)

        return call

    def gathers() -> str:
        found = group.all_gather_object({"rank": group.rank})
        return "" if found == [{"rank": rank} for rank in ranks] else f"got {found}"

    def averages_in_node_memory() -> str:
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

    found: list[tuple[str, Callable[[], str]]] = [
        ("all_reduce fp32 sum", reduces(torch.float32, "sum", total)),
        ("all_reduce bf16 average", reduces(torch.bfloat16, "avg", total / group.size)),
        ("all_reduce int64 max", reduces(torch.int64, "max", highest)),
        ("all_reduce fp32, asynchronous", reduces(torch.float32, "sum", total, async_op=True)),
        ("all_gather of objects", gathers),
        ("average in memory of the node", averages_in_node_memory),
    ]
    if own.type == "cuda":
        found.append(
            (f"all_reduce fp32 sum on {own.type}", reduces(torch.float32, "sum", total, own))
        )
    return found


def shares_node_memory(group: Any) -> bool | None:
    """Return whether the ranks of this node map each other's memory; None for a single rank.

    Collective: over the group.
    """
    node = group.split_by_node()
    try:
        return None if node.size == 1 else shared_memory.share(node, 4096) is not None
    finally:
        node.close()


def _compared(tensor: Any, expected: float) -> str:
    # bf16 rounds the average; all other results are exact.
    wrong = (tensor.double() - expected).abs().max().item()
    return "" if wrong <= 2**-7 * expected else f"expected {expected:g}, got {tensor[0].item():g}"
