"""Ranks of an MPI job as replica groups of torchft, with its ``DiLoCo``, beside ours.

``pip install torchft-nightly`` brings ``torchft.local_sgd``; without it nothing here can be called
but ``installed_version``.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

INSTALL = "pip install torchft-nightly"
IS_INSTALLED = find_spec("torchft") is not None
_LIMIT = timedelta(seconds=120)
# A rank says that it lives so often: seldom, because the bytes on the link are counted.
_HEARTBEAT = timedelta(seconds=20)
_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


class TorchftReplica:
    """One rank as a replica group of one, whose manager averages by Gloo.

    Rank 0 has the lighthouse, which knows all replicas; each rank has the store that torchft asks
    of a replica group, and a manager, which asks the lighthouse before each average who takes part.

    Collective: constructed by all ranks of ``comm``, an mpi4py communicator, and closed by all.

    Attributes:
        manager: torchft's ``Manager``.
    """

    def __init__(self, comm: Any) -> None:
        # Else the lighthouse writes a line for each question.
        os.environ.setdefault("RUST_LOG", "error")
        from torchft.coordination import LighthouseServer
        from torchft.manager import Manager

        rank, size = comm.Get_rank(), comm.Get_size()
        self._comm = comm
        here = _own_address()
        self._lighthouse = None
        address = None
        if rank == 0:
            self._lighthouse = LighthouseServer(
                bind="[::]:0",
                min_replicas=size,
                heartbeat_timeout_ms=3000 * int(_HEARTBEAT.total_seconds()),
            )
            port = self._lighthouse.address().rpartition(":")[2]
            address = f"http://{here}:{port}"
        self._store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        self._group = _group_at(here)
        self.manager = Manager(
            pg=self._group,
            # Equal parameters at the start, and no rank that recovers.
            load_state_dict=None,
            state_dict=None,
            init_sync=False,
            min_replica_size=size,
            use_async_quorum=False,
            replica_id=str(rank),
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self._store.port,
            lighthouse_addr=comm.bcast(address),
            hostname=here,
            heartbeat_interval=_HEARTBEAT,
            timeout=_LIMIT,
            quorum_timeout=_LIMIT,
            connect_timeout=_LIMIT,
        )

    def diloco(
        self,
        fragments: Sequence[torch.nn.Module],
        inner: torch.optim.Optimizer,
        outers: Sequence[torch.optim.Optimizer],
        every: int,
        **options: Any,
    ) -> Any:
        """Return torchft's ``DiLoCo`` with its hooks on the inner optimizer."""
        from torchft.local_sgd import DiLoCo

        made = DiLoCo(self.manager, list(fragments), inner, list(outers), every, **options)
        return made.__enter__()

    def close(self) -> None:
        """End the manager, then the lighthouse. Collective: over the ranks."""
        self._comm.Barrier()
        self.manager.shutdown()
        self._group.shutdown()
        self._comm.Barrier()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def installed_version() -> str | None:
    """Return torchft's version; None if it is not installed."""
    for name in ("torchft-nightly", "torchft"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return None


def even_fragments(net: torch.nn.Module, parts: int) -> list[torch.nn.Module]:
    """Return runs of a module's children, as many in each."""
    children = list(net.children())
    count = len(children)
    return [
        torch.nn.Sequential(*children[part * count // parts : (part + 1) * count // parts])
        for part in range(parts)
    ]


def _group_at(address: str) -> Any:
    """Return torchft's group over Gloo, whose store the other ranks find at an address.

    By itself it gives them the host's name, which is that of each node of a simulated network.
    """
    from torchft.process_group import ProcessGroupGloo

    class Group(ProcessGroupGloo):  # type: ignore[misc]
        def get_reconfigure_handle(self) -> str:
            handle = json.loads(super().get_reconfigure_handle())
            handle["store"] = f"{address}:{handle['store'].rpartition(':')[2]}"
            return json.dumps(handle)

    return Group(timeout=_LIMIT)


def _own_address() -> str:
    """Return this rank's address: of the interface that Gloo is told to use, else the loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if not name:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        packed = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(one.fileno(), _SIOCGIFADDR, packed)[20:24])
