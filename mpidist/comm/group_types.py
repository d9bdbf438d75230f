"""Types of process groups in annotations; the import of this module loads no group."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch.distributed

    from mpidist.comm.group import ProcessGroup

Group: TypeAlias = "ProcessGroup"
# What users pass as a ``process_group``: a native group, a group of torch.distributed on the
# backend ``mpidist``, or None for the default group.
AnyGroup: TypeAlias = "ProcessGroup | torch.distributed.ProcessGroup | None"
