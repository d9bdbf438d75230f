"""Window of ``torch.distributed`` over a native one.

torch's ``Window`` (2.14 and later) can be neither subclassed nor made from Python, so callers in
Python get an object with its methods, and callers in C++ get none.

Source: torch/csrc/distributed/c10d/Window.hpp.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import Work

from mpidist.c10d.work import ENDED, TorchWork
from mpidist.comm.window import Window
from mpidist.dynamo import untraced

_c10d: Any = _distributed_c10d
_NO_TIME = timedelta(0)


@untraced
class TorchWindow:
    """A native window with torch's arguments and works.

    Args:
        native: The native window, whose methods have the documentation.
    """

    def __init__(self, native: Window) -> None:
        self.native = native

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """See ``Window.tensor_register`` of ``comm/window``."""
        self.native.tensor_register(tensor, owning)

    def tensor_deregister(self) -> None:
        """See ``Window.tensor_deregister`` of ``comm/window``."""
        self.native.tensor_deregister()

    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool,
        opts: Any = None,
    ) -> Work:
        """See ``Window.put`` of ``comm/window``."""
        return _work(
            self.native.put(tensor, dst_rank, target_offset_nelems, async_op, _limit(opts))
        )

    def signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Work:
        """See ``Window.signal`` of ``comm/window``."""
        return _work(self.native.signal(peer_rank, async_op))

    def wait_signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Work:
        """See ``Window.wait_signal`` of ``comm/window``."""
        return _work(self.native.wait_signal(peer_rank, async_op, _limit(opts)))

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """See ``Window.map_remote_tensor`` of ``comm/window``."""
        return self.native.map_remote_tensor(rank)

    def get_attr(self, peer_rank: int) -> Any:
        """See ``Window.get_attr`` of ``comm/window``; torch's ``WindowAttr``."""
        attr = _c10d.WindowAttr()
        access = self.native.get_attr(peer_rank).access_type
        attr.access_type = getattr(_c10d.WindowAccessType, access.name)
        return attr


def _work(native: Any) -> Work:
    return ENDED if native is None else TorchWork(native, [])


def _limit(opts: Any) -> timedelta | None:
    # torch's unset timeout is negative.
    return None if opts is None or opts.timeout <= _NO_TIME else opts.timeout
