"""Gloo and NCCL backends in a mixed group: requirements and construction."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpidist.c10d import generation
from mpidist.c10d.names import OURS
from mpidist.comm.group import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import _DistributedBackendOptions as BackendOptions

_GLOO = "gloo"
# torch 2.15 has three of them, and "nccl" is one.
_NCCL = frozenset({"nccl", "nccl2", "nccl-lazy", "nccl-legacy"})


def require_known(backends: Mapping[str, str]) -> None:
    """Refuse a list with a backend that cannot share a group with mpidist.

    Raises:
        ValueError: On all ranks, because all have the same list.
    """
    unknown = sorted(set(backends.values()) - {OURS, _GLOO} - _NCCL)
    if unknown:
        listed = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        raise ValueError(
            f'a group cannot be shared between backends as "{listed}" asks: gloo and nccl '
            f"share one with {OURS}, "
            f"{', '.join(unknown)} does not. Make a group of its own for it: "
            f'torch.distributed.new_group(backend="{unknown[0]}")'
        )


def obstacle(backends: Mapping[str, str]) -> str | None:
    """Return why a backend of the list cannot be created on this machine, or None."""
    names = set(backends.values())
    if names & _NCCL:
        missing = None
        # With MPIDIST_REPLACE, torch.distributed.is_nccl_available is replaced; this one is not.
        if not distributed_c10d.is_nccl_available():
            missing = f"this torch ({torch.__version__}) was built without it"
        elif not torch.cuda.is_available():
            missing = "torch finds no CUDA device here"
        if missing:
            return (
                f'no NCCL there: {missing}. Write backend="{OURS}", which carries tensors of every '
                "device by MPI, or start the "
                "job on nodes with GPUs and a torch that was built for them"
            )
    if _GLOO in names:
        chosen = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        try:
            for name in chosen:
                distributed_c10d.ProcessGroupGloo.create_device(interface=name)
            if not chosen:
                distributed_c10d.ProcessGroupGloo.create_default_device()
        except RuntimeError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            return (
                f"Gloo finds no address ({error}). Set GLOO_SOCKET_IFNAME to one of this node's "
                f"interfaces: {there}"
            )
    return None


def mixed_group(
    native: ProcessGroup,
    options: BackendOptions,
    backends: Mapping[str, str],
    device_id: torch.device | None,
    nccl_options: Any,
) -> Any:
    """Create the other backends of a list and the mixed group.

    Collective: over the members.

    Args:
        native: The native group, which is closed if another backend cannot be created.
        options: torch's DistributedBackendOptions.
        backends: Backend names by device type.
        device_id: The GPU that the group is bound to, or None.
        nccl_options: ``pg_options`` of the caller, or None.

    Raises:
        ValueError: On all ranks: a backend cannot be created on some rank.
    """
    where = native.where("init_process_group or new_group")
    native.journal.note_own()
    # torch counts its groups from 0 again after destroy_process_group(), and a store may outlive
    # that: the backends of a later group of the same name would read the addresses of the earlier.
    found = native.all_gather_object((obstacle(backends), uuid.uuid4().hex))
    for rank, (problem, _) in enumerate(found):
        if problem is not None:
            native.close()
            raise ValueError(
                f"{where} asks for backends by device, which rank {rank} cannot have: {problem}"
            )
    others = {
        name: _created(name, options, nccl_options, key=found[0][1])
        for name in sorted(set(backends.values()) - {OURS})
    }
    return generation.mixed_group(
        native, options.store, str(options.group_id), backends, others, device_id
    )


def _created(name: str, options: BackendOptions, given: Any, key: str) -> tuple[Any, Any]:
    """Return torch's BackendType of a backend, and a Backend over the members of a group.

    Collective: over the members.

    Args:
        key: Of the group, equal on its members, and of no other group.
    """
    kind = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
    store = dist.PrefixStore(f"other/{key}/{name}/", options.store)
    # torch 2.15 registers a backend at its first use.
    register = getattr(dist.Backend, "_ensure_backend_registered", None)
    if register is not None and name in _NCCL:
        register(name)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None and plugin.extended_api:
        made = plugin.creator_fn(_with_store(options, store), given if name != _GLOO else None)
    else:
        made = _gloo(store, options) if name == _GLOO else _nccl(store, options, given)
        made._set_sequence_number_for_group()
    return kind, made


def _with_store(options: BackendOptions, store: dist.Store) -> BackendOptions:
    """Return options for the creator of another backend, which needs keys of its own."""
    made: Any = distributed_c10d._DistributedBackendOptions()
    made.store, made.group_id, made.timeout = store, options.group_id, options.timeout
    made.group_rank, made.group_size = options.group_rank, options.group_size
    made.global_ranks_in_group = options.global_ranks_in_group
    made.process_group = getattr(options, "process_group", None)
    return made


def _gloo(store: dist.Store, options: Any) -> distributed_c10d.ProcessGroupGloo:
    backend = distributed_c10d.ProcessGroupGloo(
        store, options.group_rank, options.group_size, timeout=options.timeout
    )
    backend.options.global_ranks_in_group = options.global_ranks_in_group
    backend.options.group_name = options.group_id
    return backend


def _nccl(store: dist.Store, options: BackendOptions, given: Any) -> Any:
    chosen = given if given is not None else distributed_c10d.ProcessGroupNCCL.Options()
    chosen._timeout = options.timeout
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_id
    return distributed_c10d.ProcessGroupNCCL(store, options.group_rank, options.group_size, chosen)
