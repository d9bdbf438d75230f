"""``torch.distributed.send`` and ``recv`` on a group of mpidist, without a handle between them.

torch's functions ask the group for a handle and wait for it, so the group cannot know that its
caller waits for this message alone. The functions that replace them call the native group, and
torch's function for other backends, modes, hooks, subclasses, and what torch itself refuses or
converts: a message to oneself, complex tensors, leaves that are received into. Modules that
imported the functions by name before the first group was made keep torch's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpidist.c10d import generation
from mpidist.dynamo import untraced

if TYPE_CHECKING:
    import torch.distributed as dist

    from mpidist.comm.group import ProcessGroup

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def install() -> None:
    """Replace torch's two functions, once per process."""
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    if hasattr(c10d.send, "is_of_mpidist"):
        return
    find = _finder(c10d)
    for name, function in (("send", _send(c10d.send, find)), ("recv", _recv(c10d.recv, find))):
        function.is_of_mpidist = True
        for module in (c10d, importlib.import_module("torch.distributed")):
            setattr(module, name, untraced(function))


# The native group and the peer's rank in it, or None if torch's function must be called.
_Found = tuple["ProcessGroup", int]
_Find = Callable[["dist.ProcessGroup | None", torch.Tensor, Any], "_Found | None"]


def _finder(c10d: Any) -> _Find:
    # Groups of several backends are of a subclass, and choose by the tensor's device.
    kind, world = generation.group_class(), c10d._world
    group_rank = c10d.get_group_rank

    @untraced
    def find(group: dist.ProcessGroup | None, tensor: torch.Tensor, peer: Any) -> _Found | None:
        chosen: Any = world.default_pg if group is None else group
        if (
            type(chosen) is not kind
            or type(peer) is not int
            or type(tensor) is not torch.Tensor
            or tensor.is_complex()
            or chosen._is_observed()
            or _function_modes()
        ):
            return None
        native: ProcessGroup = chosen.native
        if chosen is not world.default_pg:
            try:
                peer = group_rank(chosen, peer)
            except ValueError:
                return None
        return None if peer == native.rank else (native, peer)

    return find


def _send(original: Callable[..., None], find: _Find) -> Any:
    @functools.wraps(original)
    def send(
        tensor: torch.Tensor,
        dst: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        found = find(group, tensor, dst) if group_dst is None else None
        if found is None:
            original(tensor, dst, group, tag, group_dst)
            return
        native, rank = found
        native.send(tensor, rank, tag)

    return send


def _recv(original: Callable[..., int], find: _Find) -> Any:
    @functools.wraps(original)
    def recv(
        tensor: torch.Tensor,
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        found = find(group, tensor, src) if group_src is None else None
        if found is None or src is None or tensor.requires_grad:
            return original(tensor, src, group, tag, group_src)
        native, rank = found
        native.recv(tensor, rank, tag)
        return src

    return recv
