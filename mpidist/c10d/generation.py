"""Classes of groups for the torch that is installed.

Since 2.14 a Python class may be a ``Backend`` of torch. ``up_to_213`` holds what older versions
need instead, and goes with them; no other module knows the version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from mpidist import torch_version

if TYPE_CHECKING:
    from mpidist.comm.group import ProcessGroup

# 2.13 has the name, but C++ does not call methods of a Python class there.
HAS_BACKENDS = torch_version.numbers(torch.__version__) >= (2, 14)
FOLDER = "mpidist.c10d" if HAS_BACKENDS else "mpidist.c10d.up_to_213"


def group_of_torch(native: ProcessGroup, store: Any, name: str, origin: str | None = None) -> Any:
    """Return torch's group over a native group.

    Args:
        native: The native group.
        store: The store that torch creates the group with.
        name: torch's name of the group.
        origin: From ``reconfiguring.origin_of``, for a group that can change its members.
    """
    if origin is not None:
        # torch has such groups from 2.14 on.
        reconfiguring = importlib.import_module(f"{FOLDER}.reconfiguring")
        return reconfiguring.ReconfigurableGroup(native, store, name, origin)
    return group_class()(native, store, name)


def group_class() -> Any:
    """Return the class of torch's groups over a native group alone."""
    return importlib.import_module(f"{FOLDER}.process_group").TorchProcessGroup


def mixed_group(
    native: ProcessGroup, store: Any, name: str, backends: Any, others: Any, device_id: Any
) -> Any:
    """Return torch's group over a native group and Backends of torch.

    Args:
        native: The native group.
        store: The store that torch creates the group with.
        name: torch's name of the group.
        backends: Backend names by device type.
        others: torch's BackendType and Backend by the names of the other backends.
        device_id: The GPU that the group is bound to, or None.
    """
    made = importlib.import_module(f"{FOLDER}.mixed").MixedProcessGroup(
        native, store, name, backends, others
    )
    if device_id is not None:
        made.bound_device_id = device_id
    return made


def replaced_functions() -> None:
    """Let functions of ``torch.distributed`` take groups of mpidist that they refuse by name."""
    if not HAS_BACKENDS:
        importlib.import_module("mpidist.c10d.up_to_213.overrides").install()
