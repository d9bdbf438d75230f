"""Native group behind a group of ``torch.distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpidist.comm.group import ProcessGroup

# Key of the native groups that are made for torch.
KEY = "torch.distributed"


def native_of(group: object) -> ProcessGroup | None:
    """Return the native group behind a torch group, or None for a group of another backend."""
    return getattr(group, "native", None)
