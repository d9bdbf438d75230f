"""Questions asked of MPI through ``mpidist.comm``: its start, what it can do, and tiny operations that show that it works."""

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
    """What MPI says on one rank.

    Attributes:
        library: First line of what the library says of itself.
        abi: ``openmpi`` or ``mpich``.
        file: Path of its ``libmpi``.
        mpirun: Path of its launcher; "" if none was found.
        standard: The MPI standard that it follows.
        thread_level: MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE.
        size: Ranks of the job.
        local_rank: Index on the node, as MPI sees it.
        local_size: Ranks that share this node's memory.
        nodes: For each rank the number of its node.
        survives_failures: ULFM is there and switched on.
        cuda_aware: The library takes device pointers; None if it does not say.
        cuda_source: Who says so.
        cuda_before_mpi: A CUDA context existed when MPI started; None if that does not matter here.
        operations: What each operation on device memory came to, by name.
        transports: What is known of them.
        shares_memory: The ranks of this node map each other's memory; None for a rank that is alone
            there, or not asked.
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
    """Start MPI. Collective: over the job.

    Raises:
        LaunchError: The job was started in a way in which MPI cannot connect its ranks, or there is
            no MPI.
        CommTimeout: Not all ranks came in time.
    """
    return runtime.world(timeout_s)


def ask(facts: Facts, library: Installed) -> Facts:
    """Return this rank's facts with what MPI and CUDA say. Local, after ``start``."""
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
    """Try each operation on device memory in a job of its own, and keep what came out. Collective: over the group.

    Blocks: some seconds to minutes, the first time on a machine.
    """
    device = runtime.device()
    if device.type == "cuda":
        capability.agreed_operations(group._comm, device)


def gather(facts: Facts) -> list[Facts]:
    """Return all ranks' facts, by rank, on every rank. Collective: over the job."""
    encoded = bytes(frame.to_bytes(asdict(facts), data_only=True))
    every = byte_strings.gathered(runtime.world().comm, encoded)
    return [_facts(frame.from_bytes(data, data_only=True)) for data in every]


def _facts(fields: dict[str, Any]) -> Facts:
    mpi, device = fields["mpi"], fields["device"]
    if mpi is not None:
        mpi = MpiFacts(**{**mpi, "transports": Transports(**mpi["transports"])})
    return Facts(**{**fields, "mpi": mpi, "device": None if device is None else Device(**device)})


def trial_group(timeout_s: float) -> Any:
    """Make a group of all ranks whose calls raise past the timeout. Collective: over the job."""
    return from_world("doctor", timeout_s, on_timeout="raise")


def with_operations(facts: Facts) -> Facts:
    """Return the facts with what operations on device memory came to by now. Local."""
    return replace(
        facts, mpi=replace(facts.mpi, operations=dict(capability.capabilities().operations))
    )


def check(group: Any) -> dict[str, str]:
    """Do one tiny operation of each kind, and check its result. Collective: over the group, whose calls raise on a timeout.

    Returns:
        By name "" or what is wrong on this rank. After an exception the rest is "not tried": the
        group has failed, or ranks are out of step.
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
    """Say whether ranks of this node map each other's memory; None for a rank that is alone there.

    Collective: over the group.
    """
    node = group.split_by_node()
    try:
        return None if node.size == 1 else shared_memory.share(node, 4096) is not None
    finally:
        node.close()


def _compared(tensor: Any, expected: float) -> str:
    # bf16 rounds the average; every other result here is exact.
    wrong = (tensor.double() - expected).abs().max().item()
    return "" if wrong <= 2**-7 * expected else f"expected {expected:g}, got {tensor[0].item():g}"
