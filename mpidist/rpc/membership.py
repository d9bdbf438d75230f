"""Membership of one ``init_rpc``: the group, its transport, and the exchange of descriptions."""

from __future__ import annotations

import operator
import os
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch

from mpidist.comm import world_group
from mpidist.comm.group import ProcessGroup
from mpidist.comm.mpi import launcher_env, runtime
from mpidist.comm.serialization.tensor_format import HOST
from mpidist.comm.transport.transport import Transport
from mpidist.errors import MpidistError
from mpidist.rpc import current, worker_gather
from mpidist.rpc.worker import WorkerInfo, Workers, duplicate_names

# By world ranks. A transport serves successive agents of the same ranks; each has a generation.
_transports: dict[tuple[int, ...], Transport] = {}
_groups: dict[int, ProcessGroup] = {}
_lock = threading.Lock()
_CLOSE_S = 5.0  # longest wait for a transport's receives when its world ends
_MAX_DEVICES = 255  # the limit of a payload's header


def transport_of(world_size: object, group: ProcessGroup | None) -> Transport:
    """Return the transport of the workers, with its next generation.

    Args:
        world_size: Of ``init_rpc``; one of a wrong type counts as None, until ``check_place``.
        group: Of ``init_rpc``.

    Raises:
        MpidistError: ``world_size`` differs from MPI's.
    """
    if world_size == 1 and group is None:
        key: tuple[int, ...] = ()
    else:
        size = operator.index(world_size) if isinstance(world_size, SupportsIndex) else None
        group = group or _group(size)
        key = group.world_ranks
    with _lock:
        transport = _transports.get(key)
        if transport is None:
            own = None if group is None else group.clone("rpc")
            if own is not None:
                own.end_with_world()
            transport = _transports[key] = Transport(own)
        transport.generation += 1
        return transport


def check_place(transport: Transport, rank: int, world_size: int | None) -> None:
    """Check that this process has the place among the workers that ``init_rpc`` was given.

    Raises:
        TypeError: ``rank`` or ``world_size`` is not an int.
        MpidistError: ``rank`` or ``world_size`` differs from MPI's.
    """
    # A number read from the environment is a str.
    for name, number in (("rank", rank), ("world_size", -1 if world_size is None else world_size)):
        if not isinstance(number, SupportsIndex):
            raise TypeError(f"init_rpc takes {name} as an int, or without it; got {number!r}")
    if rank not in (-1, transport.rank):
        raise MpidistError(
            f"rank {rank} is not one of the 1 worker that world_size=1 announces"
            if transport.group is None
            else f"init_rpc was given rank {rank}, but MPI has started this process as rank "
            f"{transport.rank}; leave it out"
        )
    if world_size not in (None, transport.size):
        raise MpidistError(
            f"init_rpc was given world_size {world_size}, but the group has {transport.size} "
            "ranks; leave it out"
        )


def _group(world_size: int | None) -> ProcessGroup:
    if not runtime.is_initialized() and world_size is not None:
        launched_size = launcher_env.from_environment(os.environ).size
        if launched_size is not None and launched_size > 1 and launched_size != world_size:
            raise MpidistError(
                f"init_rpc was given world_size {world_size}, but the job has {launched_size} "
                "ranks; for fewer, call mpidist.comm.init() on all ranks first, or give group="
            )
    world = world_group.init()
    if world_size is None or world_size == world.size:
        return world
    if world.size == 1 < world_size:
        raise MpidistError(launcher_env.alone(world_size, f"init_rpc's world_size={world_size}"))
    if not 1 < world_size < world.size:
        raise MpidistError(
            f"init_rpc was given world_size {world_size}, but the job has {world.size} ranks; "
            "leave it out"
        )
    group = _groups.get(world_size)
    if group is None:
        group = world.new_group(range(world_size), f"rpc-{world_size}")
        if group is None:
            raise MpidistError(
                f"rank {world.rank} is not among the first {world_size} ranks of the job"
            )
        group.end_with_world()
        _groups[world_size] = group
    return group


def _uses() -> list[str]:
    agent = current.agent
    return [] if agent is None or agent.group is None else [f"RPC of {agent.workers.me.name}"]


def _abandon() -> None:
    agent = current.agent
    if agent is not None and agent.group is not None:
        agent.stop()
        current.agent = None
        worker_gather.reset()


def _settle(timeout_s: float | None) -> None:
    agent = current.agent
    if agent is not None and agent.group is not None:
        agent.take_turns()


def _drop() -> None:
    with _lock:
        for ranks, transport in list(_transports.items()):
            # A worker alone is in no world.
            if transport.group is not None:
                transport.close(_CLOSE_S)
                transport.group.close()
                del _transports[ranks]
        for group in _groups.values():
            group.close()
        _groups.clear()


runtime.belongs_to_world(_drop, _uses, _abandon, _settle)


class _Description(NamedTuple):
    """Description of one worker, as sent to all others at the start.

    Attributes:
        name: The worker's name.
        generation: The number of calls of ``init_rpc`` by these ranks, equal on all of them.
        device_maps: Of the worker's options.
        devices: Number of CUDA devices that the worker sees.
        is_data_only: The worker has a list, and reads data only.
        problem: Reason why the worker cannot join, else None.
    """

    name: str
    generation: int
    device_maps: dict[str, dict[int, int]]
    devices: int
    is_data_only: bool
    problem: str | None


def gather_workers(
    transport: Transport,
    name: str,
    device_maps: Mapping[str, Mapping[int, int]],
    is_data_only: bool,
    problem: BaseException | None,
) -> tuple[Workers, list[dict[str, dict[int, int]]]]:
    """Exchange the descriptions of all workers, as plain data.

    Collective: over all workers.

    Args:
        transport: Of the workers.
        name: This worker's name.
        device_maps: Of this worker's options.
        is_data_only: This worker has a list, and reads data only.
        problem: The reason why this worker cannot join; raised here, and sent to all others.

    Returns:
        The workers, and their device maps by rank.

    Raises:
        MpidistError: On all workers: the descriptions do not match, or a worker has a problem.
    """
    # Not ``str``, which may raise in turn.
    lines = [] if problem is None else traceback.format_exception_only(problem)
    text = "".join(lines).strip() or None
    mine = [
        name if isinstance(name, str) else "",
        transport.generation,
        device_maps,
        torch.cuda.device_count(),
        is_data_only,
        text,
    ]
    everyone = (
        transport.group.all_gather_object(mine, data_only=True)
        if transport.group is not None
        else [mine]
    )
    if problem is not None:
        raise problem
    descriptions = [_validate(rank, one) for rank, one in enumerate(everyone)]
    workers = _require_consistent(descriptions)
    data_only = [rank for rank, one in enumerate(descriptions) if one.is_data_only]
    maps = [one.device_maps for one in descriptions]
    return Workers(workers, transport.rank, transport.world_ranks, data_only), maps


def _require_consistent(descriptions: Sequence[_Description]) -> list[WorkerInfo]:
    """Check the descriptions of all workers against each other; return the workers.

    Raises:
        MpidistError: A worker has a problem, or names, generations or device maps do not match, or
            a device of a map is missing.
    """
    for rank, one in enumerate(descriptions):
        if one.problem is not None:
            raise MpidistError(f"init_rpc has failed on rank {rank} ({one.name}): {one.problem}")
    workers = [WorkerInfo(one.name, rank) for rank, one in enumerate(descriptions)]
    duplicates = duplicate_names(workers)
    if duplicates:
        raise MpidistError(
            f"RPC worker name is not unique: {', '.join(map(repr, duplicates))} among "
            f"{[worker.name for worker in workers]}"
        )
    counts = {one.generation for one in descriptions}
    if len(counts) > 1:
        raise MpidistError(
            f"ranks have initialised RPC a different number of times: {sorted(counts)}; a rank has "
            "missed an init_rpc"
        )
    unknown = sorted(
        {worker for one in descriptions for worker in one.device_maps}
        - {worker.name for worker in workers}
    )
    if unknown:
        raise MpidistError(
            f"device maps name workers that there are not: {unknown}; the workers are {workers}"
        )
    devices = {one.name: one.devices for one in descriptions}
    for one in descriptions:
        _require_devices(one, devices)
    return workers


def _require_devices(description: _Description, devices: Mapping[str, int]) -> None:
    """Check that both ends of a worker's device maps see the devices.

    Args:
        devices: Number of devices by worker.

    Raises:
        MpidistError: A device is missing.
    """
    for to, device_map in description.device_maps.items():
        for pair in device_map.items():
            for name, index in zip((description.name, to), pair, strict=True):
                if index >= devices[name]:
                    raise MpidistError(
                        f"the device map of {description.name} for {to} names cuda:{index} of "
                        f"{name}, which sees {devices[name]} CUDA devices"
                    )


def _validate(rank: int, description: Any) -> _Description:
    """Return the description that a rank has sent, checked.

    Raises:
        MpidistError: The description is invalid.
    """
    try:
        name, generation, maps, devices, is_data_only, problem = description
        pairs = [pair for device_map in maps.values() for pair in device_map.items()]
        is_right = (
            type(name) is str
            and type(generation) is int
            and type(devices) is int
            and type(is_data_only) is bool
            and (problem is None or type(problem) is str)
            and all(type(worker) is str for worker in maps)
            and all(
                type(index) is int and HOST <= index < _MAX_DEVICES
                for pair in pairs
                for index in pair
            )
        )
    except (TypeError, ValueError, AttributeError):
        is_right = False
    if not is_right:
        raise MpidistError(f"rank {rank} has sent an invalid description of its worker")
    return _Description(name, generation, maps, devices, is_data_only, problem)
