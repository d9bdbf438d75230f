"""torch's names of a reducer that frameworks call, in terms of ``Reducer``.

Source: ``torch._C._distributed_c10d.Reducer``, as ``torch/nn/parallel/distributed.py`` and
Lightning's strategies use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from mpidist.ddp.backward_pass import BackwardPass
from mpidist.dynamo import untraced

Tensor = torch.Tensor


class Waitable(Protocol):
    """A future of a buffer hook."""

    def wait(self) -> object:
        """Wait for the buffers."""


@untraced
class ReducerNames:
    """torch's names of a reducer; mixed into ``Reducer``."""

    arm: Callable[[Sequence[Tensor]], None]
    _handles: list[RemovableHandle]
    _pass: BackwardPass | None
    _futures: list[Waitable]

    def prepare_for_forward(self) -> None:
        """Do nothing: a forward pass needs no preparation."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Average the next backward pass, for a caller that has not run ``forward`` of DDP."""
        self.arm(list(outputs))

    def _rebuild_buckets(self) -> bool:
        """Return False: the end of the first backward pass rebuilds the buckets."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: a static graph's first backward pass ends by itself."""

    def _check_reducer_finalized(self) -> None:
        if self._pass is not None and self._pass.is_begun:
            raise RuntimeError(
                "the last backward pass of a DistributedDataParallel has begun and not ended: an "
                "exception has interrupted it"
            )

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _install_post_backward_futures(self, futures: Iterable[Waitable]) -> None:
        """Wait for ``futures`` at the end of the next backward pass."""
        self._futures += futures

    def wait_for_futures(self) -> None:
        """Wait for the installed futures."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
