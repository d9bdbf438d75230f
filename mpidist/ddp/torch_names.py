"""Attributes of torch's ``DistributedDataParallel`` and ``Reducer`` beyond their documented ones, which frameworks read.

Lightning asks for ``static_graph``, ``find_unused_parameters`` and ``_get_ddp_logging_data()``; Lightning's manual optimization
and Accelerate's ``trigger_sync_in_backward`` call ``reducer.prepare_for_backward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.ddp.layout import Settings


class ModuleNames:
    """Attributes of torch's module that hold what was chosen at construction.

    Attributes:
        settings: The choice, which a class with this base sets.
    """

    settings: Settings

    @property
    def static_graph(self) -> bool:
        """Say whether the parameters in use never change."""
        return self.settings.static_graph

    @property
    def find_unused_parameters(self) -> bool:
        """Say whether parameters may lack a gradient."""
        return self.settings.find_unused_parameters

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Say whether gradients are views of the buckets."""
        return self.settings.gradient_as_bucket_view

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        # Lightning asks whether static_graph could be set; this module never looks for that.
        return {"can_set_static_graph": False, "static_graph": self.static_graph}


class ReducerNames:
    """Calls of torch's reducer that frameworks make around a backward pass within a forward pass."""

    def arm(self, outputs: Sequence[torch.Tensor]) -> None:
        """See Reducer.arm."""
        raise NotImplementedError

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Average the gradients of the next backward pass, whose outputs may be unknown: an empty list."""
        self.arm([output for output in outputs if output.requires_grad])

    def _rebuild_buckets(self) -> bool:
        # torch lays buckets out anew here; ours are, at the end of the first pass.
        return False

    def _delay_all_reduce(self) -> None:
        # torch's first pass of a static graph ends in a callback that only its forward pass installs; ours installs its own.
        pass
