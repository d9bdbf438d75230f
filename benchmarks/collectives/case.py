"""One collective at one size: communicators, buffers, contenders, and the check of the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from harness.timing import Contender

FP32_BYTES = 4


_LATE_S = 0.03


@dataclass(frozen=True)
class Ways:
    """Communicators of the contenders; torch's default group is mpidist's backend."""

    gloo: Any  # torch.distributed.ProcessGroup
    raw: Any  # mpi4py.MPI.Comm
    native: Any  # mpidist.comm.ProcessGroup
    mpi: Any  # the module mpi4py.MPI

    @property
    def rank(self) -> int:
        return self.raw.Get_rank()

    @property
    def size(self) -> int:
        return self.raw.Get_size()


@dataclass
class Case:
    """One operation at one size.

    Attributes:
        expected: ``expected(k)`` returns the required contents of all outputs, concatenated, after
            call k of a contender; None if the contents are undefined.
        inputs: Tensors, each with the values that ``wrong`` writes before each call.
    """

    operation: str
    numel: int
    contenders: list[Contender] = field(default_factory=list)
    inputs: list[tuple[torch.Tensor, np.ndarray]] = field(default_factory=list)
    expected: Callable[[int], np.ndarray | None] = lambda k: None

    @property
    def size_bytes(self) -> int:
        return self.numel * FP32_BYTES

    def wrong(self, ways: Ways) -> list[str]:
        """Run each call of each contender on fresh values; return wrong contenders of all ranks."""
        found = []
        for contender in self.contenders:
            for k, call in enumerate(contender.calls):
                self._fill(contender)
                call()
                values, expected = self._values(contender), self.expected(k)
                # bf16 rounds once per addition. fp32 is exact, because the values are small
                # integers.
                tolerance = (
                    0.02
                    if contender.outputs and contender.outputs[0].dtype is torch.bfloat16
                    else 0
                )
                if expected is not None and not np.allclose(
                    values, expected, rtol=tolerance, atol=0
                ):
                    found.append(f"{contender.name} (call {k}) on rank {ways.rank}")
        return list(chain.from_iterable(ways.raw.allgather(found)))

    def zero(self) -> None:
        """Set buffers to zero: repeated sums in place must stay finite."""
        for contender in self.contenders:
            for tensor in contender.outputs:
                tensor.zero_()
        for tensor, _ in self.inputs:
            tensor.zero_()

    def _fill(self, contender: Contender) -> None:
        for tensor in contender.outputs:
            tensor.fill_(-1)
        for tensor, values in self.inputs:
            tensor.copy_(torch.from_numpy(values))

    def _values(self, contender: Contender) -> np.ndarray:
        return np.concatenate([tensor.float().flatten().numpy() for tensor in contender.outputs])


class BarrierCase(Case):
    """Barrier, whose only result is that no rank leaves before the last rank has entered."""

    def wrong(self, ways: Ways) -> list[str]:
        found = []
        for contender in self.contenders:
            for late in (0, ways.size - 1):
                start = time.perf_counter()
                ways.raw.Barrier()
                if ways.rank == late:
                    time.sleep(_LATE_S)
                contender.calls[0]()
                if time.perf_counter() - start < _LATE_S:
                    found.append(
                        f"{contender.name} left before rank {late} came, on rank {ways.rank}"
                    )
        return list(chain.from_iterable(ways.raw.allgather(found)))
