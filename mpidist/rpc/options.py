"""Settings of ``init_rpc``, with torch's names."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch

from mpidist.comm.serialization.tensor_format import HOST
from mpidist.rpc.constants import DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from mpidist.rpc.worker import WorkerInfo

Device = int | str | torch.device


class BackendType(enum.Enum):
    """Backends of RPC. MPI is used for both members.

    ``TENSORPIPE`` exists so that torch's programs need to change only the import.
    """

    MPI = "MPI"
    TENSORPIPE = "TENSORPIPE"


class RpcBackendOptions:
    """Settings of an agent.

    Args:
        rpc_timeout: Timeout of calls without one of their own: seconds or a timedelta; 0 for none.
        init_method: Ignored, because MPI assigns the ranks; for torch's signature.
        num_worker_threads: The maximum number of handlers that run at once. Handlers that wait for
            an answer do not count.
        device_maps: By worker name: maps a device here, a CUDA device or ``"cpu"``, to the device
            of that worker that receives its tensors. Answers use the inverse map. Host tensors
            stay on the host unless ``"cpu"`` is named.
        devices: CUDA devices here that send or receive tensors; those of ``device_maps`` are added.

    Raises:
        ValueError: A device is neither a CUDA device nor the CPU, two devices map to one, or a
            timeout is below 0.
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
        """Extend the device map of one worker.

        Args:
            to: The worker's name.
            device_map: From devices here to devices of that worker.

        Raises:
            ValueError: A device is mapped already, or two devices map to one.
        """
        name = to.name if isinstance(to, WorkerInfo) else to
        merged = dict(self.device_maps.get(name, {}))
        for source, target in device_map.items():
            source_index, target_index = _index(source), _index(target)
            if merged.get(source_index, target_index) != target_index:
                raise ValueError(
                    f"device map for {name}: {_name(source_index)} goes to "
                    f"{_name(merged[source_index])} already"
                )
            merged[source_index] = target_index
        if len(set(merged.values())) < len(merged):
            raise ValueError(
                f"device map for {name}: two devices go to one, and no answer could come back: "
                f"{merged}"
            )
        self.device_maps[name] = merged
        self.set_devices(
            [
                *self.devices,
                *(torch.device("cuda", index) for index in merged if index != HOST),
            ]
        )

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the CUDA devices here that send or receive tensors.

        Raises:
            ValueError: One is not a CUDA device.
        """
        indices = [_index(device) for device in devices]
        if HOST in indices:
            raise ValueError("devices= and set_devices() take CUDA devices; got the CPU")
        self.devices = [torch.device("cuda", index) for index in dict.fromkeys(indices)]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rpc_timeout={self.rpc_timeout:g}, "
            f"num_worker_threads={self.num_worker_threads}, "
            f"device_maps={self.device_maps})"
        )


def select_options(backend: object, options: object) -> RpcBackendOptions:
    """Check the arguments of ``init_rpc``; return the options, or the defaults for None.

    Raises:
        TypeError: An argument of another type.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError(
            "Argument backend must be a member of BackendType: leave it out, or give "
            "BackendType.MPI"
        )
    if options is None:
        return RpcBackendOptions()
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(
            "Could not infer backend for options. Argument rpc_backend_options must be an "
            f"instance of RpcBackendOptions of mpidist.rpc; got {type(options)}"
        )
    return options


def seconds(timeout: object) -> float:
    """Return a timeout in seconds.

    Raises:
        TypeError: Neither a number nor a timedelta.
        ValueError: Below 0, or not a number.
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a timeout is a number of seconds or a timedelta; got {timeout!r}")
    # Not ``value < 0``, which is false for NaN.
    if not value >= 0:
        raise ValueError(f"a timeout is 0 (none) or more seconds; got {timeout!r}")
    return float(value)


def _index(device: Device) -> int:
    """Return the index of a CUDA device, ``HOST`` for the CPU."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cpu":
        return HOST
    if found.type != "cuda":
        raise ValueError(f"device maps are of CUDA devices and the CPU; got {device!r}")
    return found.index or 0


def _name(index: int) -> str:
    return "cpu" if index == HOST else f"cuda:{index}"
