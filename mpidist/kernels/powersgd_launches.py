"""Launches of the PowerSGD kernels (``cuda/powersgd.cu``) on the matrices of one bucket."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpidist.kernels import powersgd_plan
from mpidist.kernels.launch import (
    NAMES,
    Argument,
    chunk_numel,
    compute_dtype,
    launch,
    scalar,
    to_device,
)


class BucketKernels:
    """Device table of one bucket, and the launches that read it.

    Args:
        items: Matrices, at least one, then whole tensors.
    """

    def __init__(
        self, items: Sequence[powersgd_plan.Item], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype, self._device = dtype, device
        computed = compute_dtype(dtype)
        plan = powersgd_plan.plan(items, chunk_numel(dtype), computed.itemsize)
        self._defines = (f"RANK={plan.rank}", f"ELEMENT={NAMES[dtype]}")
        self._items = to_device(plan.items, self._device)
        owners = (plan.row_owners, plan.column_owners, *plan.sweep_owners)
        self._owners = to_device(np.concatenate(owners), self._device)
        starts = np.cumsum([0, *(o.nbytes for o in owners)]) + self._owners.data_ptr()
        self._rows, self._columns, *self._sweeps = (
            (int(at), len(o)) for at, o in zip(starts, owners, strict=False)
        )
        self._has_tall = plan.has_tall
        self._partials = torch.empty(plan.partials_numel, dtype=computed, device=self._device)
        self._grams = torch.empty(plan.grams_numel, dtype=torch.float64, device=self._device)
        self._counters = torch.zeros(plan.counters, dtype=torch.int32, device=self._device)

    def launch(self, name: str, *args: Argument) -> None:
        """Launch ``project`` or ``reconstruct``."""
        self._launch(name, self._rows, *args)

    def backproject(self, scale: float) -> None:
        """Launch ``backproject``."""
        factor = scalar(scale, self._dtype)
        self._launch(
            "backproject",
            self._columns,
            factor,
            self._partials.data_ptr(),
            self._counters.data_ptr(),
        )

    def orthogonalize(self, is_q: int, epsilon: float) -> None:
        """Launch ``orthogonalize`` for each P, or for each Q if ``is_q`` is 1."""
        sweep, side, grams = self._sweeps[is_q], np.int32(is_q), self._grams.data_ptr()
        args = (side, scalar(epsilon, self._dtype), grams, self._counters.data_ptr())
        self._launch("orthogonalize", sweep, *args, threads=powersgd_plan.SWEEP_THREADS)
        if self._has_tall[is_q]:
            self._launch("normalize", sweep, side, grams, threads=powersgd_plan.SWEEP_THREADS)

    def _launch(
        self,
        name: str,
        grid: tuple[int, int],
        *args: Argument,
        threads: int = powersgd_plan.THREADS,
    ) -> None:
        owners, blocks = grid
        given = (self._items.data_ptr(), owners, *args)
        launch(
            "powersgd.cu",
            f"{name}_{NAMES[self._dtype]}",
            self._device,
            blocks,
            given,
            threads,
            self._defines,
        )
