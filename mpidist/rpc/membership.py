"""Workers of one ``init_rpc``: the group that they are, its transport, and what they tell each other at the start."""

from __future__ import annotations

import os
import threading

from mpidist.comm import group as groups
from mpidist.comm import launch, runtime
from mpidist.comm.group import ProcessGroup
from mpidist.comm.transport import Transport
from mpidist.errors import MpidistError
from mpidist.rpc.options import RpcBackendOptions
from mpidist.rpc.worker import WorkerInfo, Workers, doubled

# A transport serves all agents of the same ranks, one after the other; each has its generation.
_transports: dict[tuple[int, ...], Transport] = {}
_groups: dict[int, ProcessGroup] = {}
_lock = threading.Lock()


def transport_of(rank: int, world_size: int | None, group: ProcessGroup | None) -> Transport:
    """Return what carries the messages, at its next generation."""
    if world_size == 1 and group is None:
        if rank not in (-1, 0):
            raise MpidistError(f"rank {rank} is not one of the 1 worker that world_size=1 announces")
        key: tuple[int, ...] = ()
    else:
        group = group or _group(world_size)
        key = group.world_ranks
        if rank not in (-1, group.rank):
            raise MpidistError(
                f"init_rpc was given rank {rank}, but MPI has started this process as rank {group.rank}; leave it out"
            )
        if world_size not in (None, group.size):
            raise MpidistError(f"init_rpc was given world_size {world_size}, but the group has {group.size} ranks; leave it out")
    with _lock:
        transport = _transports.get(key)
        if transport is None:
            transport = _transports[key] = Transport(group.clone("rpc") if group is not None else None)
        transport.generation += 1
        return transport


def _group(world_size: int | None) -> ProcessGroup:
    if not runtime.is_initialized() and world_size is not None:
        told = launch.from_environment(os.environ).size
        if told is not None and told != world_size:
            raise MpidistError(
                f"init_rpc was given world_size {world_size}, but the job has {told} ranks; for fewer, call mpidist.comm.init() "
                "on all ranks first, or give group="
            )
    world = groups.init()
    if world_size is None or world_size == world.size:
        return world
    if not 1 < world_size < world.size:
        raise MpidistError(f"init_rpc was given world_size {world_size}, but the job has {world.size} ranks; leave it out")
    made = _groups.get(world_size)
    if made is None:
        made = world.new_group(range(world_size), f"rpc-{world_size}")
        if made is None:
            raise MpidistError(f"rank {world.rank} is not among the first {world_size} ranks of the job")
        _groups[world_size] = made
    return made


def gather_workers(
    transport: Transport, name: str, options: RpcBackendOptions
) -> tuple[Workers, list[dict[str, dict[int, int]]]]:
    """Tell all workers of this one; return all, and where they send tensors of their devices."""
    mine = (name, transport.generation, options.device_maps)
    told = transport.group.all_gather_object(mine) if transport.group is not None else [mine]
    workers = [WorkerInfo(told_name, rank) for rank, (told_name, _, _) in enumerate(told)]
    twice = doubled(workers)
    if twice:
        raise MpidistError(
            f"RPC worker name is not unique: {', '.join(map(repr, twice))} among {[worker.name for worker in workers]}"
        )
    counts = {count for _, count, _ in told}
    if len(counts) > 1:
        raise MpidistError(
            f"ranks have initialised RPC a different number of times: {sorted(counts)}; a rank has missed an init_rpc"
        )
    unknown = sorted({worker for _, _, maps in told for worker in maps} - {worker.name for worker in workers})
    if unknown:
        raise MpidistError(f"device maps name workers that there are not: {unknown}; the workers are {workers}")
    return Workers(workers, transport.rank, transport.world_ranks), [maps for _, _, maps in told]
