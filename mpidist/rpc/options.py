"""Settings of ``init_rpc``, with torch's names."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from mpidist.rpc.constants import DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from mpidist.rpc.worker import WorkerInfo

Device = int | str | torch.device


class BackendType(enum.Enum):
    """What carries the messages.

    MPI does; torch's name is taken as well, so that only the import needs to change.
    """

    MPI = "MPI"
    TENSORPIPE = "TENSORPIPE"


class RpcBackendOptions:
    """How an agent behaves.

    Args:
        rpc_timeout: Seconds (or a timedelta) after which a call fails that names no timeout itself;
            0 for never.
        init_method: torch's; MPI knows its ranks, and it is ignored.
        num_worker_threads: How many handlers run at once; those that wait for an answer do not
            count.
        device_maps: For each worker, which of its devices a tensor of a device of ours goes to.
            Answers come back by its inverse.
        devices: Our devices that tensors come to or leave from; those of ``device_maps`` are among
            them.

    Raises:
        ValueError: A device that is no CUDA device, two of ours that map to one of theirs, or a
            timeout below 0.
    """

    def __init__(
        self,
        rpc_timeout: float | timedelta = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = "mpi://",
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        *,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        self.rpc_timeout = seconds(rpc_timeout)
        self.init_method = init_method
        if num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1; got {num_worker_threads}")
        self.num_worker_threads = int(num_worker_threads)
        self.device_maps: dict[str, dict[int, int]] = {}
        self.devices: list[torch.device] = []
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)
        self.set_devices([*self.devices, *(devices or ())])

    def set_device_map(self, to: str | WorkerInfo, device_map: Mapping[Device, Device]) -> None:
        """Add to where tensors go on one worker.

        Args:
            to: The worker's name.
            device_map: From our CUDA devices to its.
        """
        name = to.name if isinstance(to, WorkerInfo) else to
        made = dict(self.device_maps.get(name, {}))
        for source, target in device_map.items():
            source_index, target_index = _index(source), _index(target)
            if made.get(source_index, target_index) != target_index:
                raise ValueError(
                    f"device map for {name}: cuda:{source_index} goes to cuda:{made[source_index]} "
                    "already"
                )
            made[source_index] = target_index
        if len(set(made.values())) < len(made):
            raise ValueError(
                f"device map for {name}: two devices go to one, and no answer could come back: "
                f"{made}"
            )
        self.device_maps[name] = made
        self.set_devices([*self.devices, *(torch.device("cuda", index) for index in made)])

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set our devices that tensors come to or leave from."""
        self.devices = [
            torch.device("cuda", index)
            for index in dict.fromkeys(_index(device) for device in devices)
        ]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rpc_timeout={self.rpc_timeout:g}, "
            f"num_worker_threads={self.num_worker_threads}, "
            f"device_maps={self.device_maps})"
        )


def seconds(timeout: Any) -> float:
    """Return a timeout in seconds.

    Raises:
        TypeError: Neither a number nor a timedelta.
        ValueError: Below 0.
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a timeout is a number of seconds or a timedelta; got {timeout!r}")
    if value < 0:
        raise ValueError(f"a timeout is 0 (none) or more seconds; got {timeout!r}")
    return float(value)


def _index(device: Device) -> int:
    made = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if made.type != "cuda":
        raise ValueError(
            "device maps are of CUDA devices; tensors on the CPU go to the CPU by themselves; got "
            f"{device!r}"
        )
    return made.index or 0
