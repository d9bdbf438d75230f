"""Memory of a call's operands: construction from a description, and comparison afterwards."""

from __future__ import annotations

import random

import numpy as np
import torch

from tests.fuzz.operands import GUARD, Operands, Tensor
from tests.fuzz.programs import Call
from tests.fuzz.references import Result
from tests.fuzz.values import values_of


class Memory:
    """Bases and views of one rank's operands.

    Attributes:
        tensors: The views that the call receives.
    """

    def __init__(self, call: Call, operands: Operands) -> None:
        self._call = call
        self._operands = operands
        self._bases: dict[int, torch.Tensor] = {}
        for number in sorted({tensor.base for tensor in operands.tensors}):
            end = max(tensor.end for tensor in operands.tensors if tensor.base == number)
            self._bases[number] = _anything(call.dtype, end + GUARD, f"{call.seed} {number}")
        for place in operands.inputs:
            tensor = operands.tensors[place]
            _write(self._view(self._bases, tensor), values_of(call, tensor))
        self._before = {number: base.clone() for number, base in self._bases.items()}
        self.tensors = [self._view(self._bases, tensor) for tensor in operands.tensors]
        for place, tensor in enumerate(operands.tensors):
            if tensor.requires_grad:
                self.tensors[place].requires_grad_()

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.tensors[place] for place in self._operands.inputs]

    @property
    def outputs(self) -> list[torch.Tensor]:
        return [self.tensors[place] for place in self._operands.outputs]

    def refill(self) -> None:
        """Restore the values from before the call."""
        with torch.inference_mode():
            for number, base in self._bases.items():
                base.copy_(self._before[number])

    def difference(self, expected: list[Result | None]) -> str:
        """Return where memory is wrong: outputs as expected, all else as before; empty if right.

        Args:
            expected: For each output; an empty list if nothing may have been written.
        """
        with torch.inference_mode():
            wanted = {number: base.clone() for number, base in self._before.items()}
            errors: dict[int, torch.Tensor] = {}
            for place, result in zip(self._operands.outputs, expected, strict=False):
                if result is None:
                    continue
                tensor, (values, tolerance) = self._operands.tensors[place], result
                _write(self._view(wanted, tensor), values.view(tensor.shape))
                if tolerance is not None:
                    base = self._before[tensor.base]
                    error = errors.setdefault(
                        tensor.base, torch.zeros(base.numel(), dtype=torch.float64)
                    )
                    _write(
                        error.as_strided(tensor.shape, tensor.stride, tensor.offset),
                        tolerance.view(tensor.shape),
                    )
            for number, base in self._bases.items():
                wrong = _wrong(base, wanted[number], errors.get(number))
                if len(wrong):
                    return self._describe(number, wrong, base, wanted[number])
        return ""

    def _view(self, bases: dict[int, torch.Tensor], tensor: Tensor) -> torch.Tensor:
        view = bases[tensor.base].as_strided(tensor.shape, tensor.stride, tensor.offset)
        return (
            view.conj()
            if tensor.bits == "conj"
            else torch._neg_view(view)
            if tensor.bits == "neg"
            else view
        )

    def _describe(
        self, number: int, wrong: list[int], base: torch.Tensor, wanted: torch.Tensor
    ) -> str:
        first = wrong[0]
        places = [
            place for place, tensor in enumerate(self._operands.tensors) if tensor.base == number
        ]
        views = ", ".join(
            f"{'in' if place in self._operands.inputs else ''}"
            f"{'out' if place in self._operands.outputs else ''}put {place}: "
            f"offset {tensor.offset} shape {tensor.shape} stride {tensor.stride} {tensor.bits}"
            for place, tensor in ((place, self._operands.tensors[place]) for place in places[:4])
        )
        return (
            f"{len(wrong)} of {base.numel()} elements of base {number} differ, the first at "
            f"{first}: "
            f"expected {wanted[first].item()}, got {base[first].item()} ({views})"
        )


def _write(view: torch.Tensor, values: torch.Tensor) -> None:
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if stride == 0 and size > 1:
            view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    view.copy_(values)


def _anything(dtype: str, count: int, seed: str) -> torch.Tensor:
    rng = np.random.default_rng(random.Random(f"memory {seed}").getrandbits(64))
    if dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, count).astype(np.bool_)).clone()
    kind = getattr(torch, dtype)
    return (
        torch.from_numpy(rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8))
        .view(kind)
        .clone()
    )


def _wrong(base: torch.Tensor, wanted: torch.Tensor, error: torch.Tensor | None) -> list[int]:
    """Return the elements that differ in their bytes, and by more than the allowed error."""
    size = base.element_size()
    same = (base.view(torch.uint8).view(-1, size) == wanted.view(torch.uint8).view(-1, size)).all(1)
    places = torch.nonzero(~same).view(-1)
    if not len(places) or not (base.dtype.is_floating_point or base.dtype.is_complex):
        return places.tolist()
    got, right = _numbers(base, places), _numbers(wanted, places)
    allowed = np.zeros(len(places)) if error is None else error[places].numpy()
    with np.errstate(all="ignore"):
        fine = (got == right) | (np.isnan(got) & np.isnan(right)) | (np.abs(got - right) <= allowed)
    return [place for place, is_fine in zip(places.tolist(), fine, strict=True) if not is_fine]


def _numbers(tensor: torch.Tensor, places: torch.Tensor) -> np.ndarray:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return tensor.to(wide)[places].numpy()
