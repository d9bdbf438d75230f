"""Operands of a call: memory layout of each tensor. Pure: data of a call and a rank.

A tensor is a view of a base with guard elements around the view and between its elements, so that
writes outside the view are detected.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fuzz.programs import COMPLEX, FLOATS, Call

GUARD = 3  # elements before and after the view


@dataclass(frozen=True)
class Tensor:
    """View of base ``base``.

    Attributes:
        bits: "neg" or "conj" if the view's elements are negatives or conjugates of the memory.
        values: Seed of an input's values; None for an output, whose memory is arbitrary.
    """

    base: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bits: str = ""
    values: str | None = None
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Elements of the base up to the last element of the view."""
        if not self.numel:
            return self.offset
        return (
            self.offset
            + 1
            + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        )


@dataclass(frozen=True)
class Operands:
    """Tensors of one rank; ``inputs`` and ``outputs`` index ``tensors`` and may share entries."""

    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def operands(call: Call, rank: int, size: int) -> Operands:
    """Return one rank's operands of a collective of tensors."""
    return _Layout(call, rank, size).operands()


class _Layout:
    def __init__(self, call: Call, rank: int, size: int) -> None:
        self.call, self.rank, self.size = call, rank, size
        self.rng = random.Random(f"layout {call.seed} {rank}")
        self.tensors: list[Tensor] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def operands(self) -> Operands:
        counts, kind = self.call.counts, self.call.kind
        if self.call.overlap:
            self.overlapping()
        elif kind in ("all_reduce", "all_reduce_coalesced"):
            for count in counts:
                self.add(count, True, True)
        elif kind == "reduce":
            self.add(counts[0], True, self.is_root)
        elif kind in ("broadcast", "broadcast_coalesced"):
            for count in counts:
                self.add(count, self.is_root, not self.is_root)
        elif kind == "all_gather":
            self.add(counts[self.rank], True)
            self.add_list(counts, False)
        elif kind.startswith("all_gather_into"):
            for count in counts:
                self.add(count, True)
                self.add(count * self.size, False, True)
        elif kind == "gather":
            self.add(counts[0], True)
            if self.is_root:
                self.add_list(counts * self.size, False)
        elif kind == "scatter":
            self.add(counts[0], False, True)
            if self.is_root:
                self.add_list(counts * self.size, True)
        elif kind == "reduce_scatter":
            sizes = counts if len(counts) > 1 else counts * self.size
            self.add(sizes[self.rank], False, True)
            self.add_list(sizes, True)
        elif kind.startswith("reduce_scatter_tensor"):
            for count in counts:
                self.add(count * self.size, True)
                self.add(count, False, True)
        elif kind == "all_to_all":
            sends, receives = exchanged(self.call, self.rank, self.size)
            self.add_list(sends, True)
            self.add_list(receives, False)
        elif kind == "all_to_all_single":
            sends, receives = exchanged(self.call, self.rank, self.size)
            self.add(sum(sends) * self.call.row, True, shape=(sum(sends), self.call.row))
            self.add(
                sum(receives) * self.call.row, False, True, shape=(sum(receives), self.call.row)
            )
        return Operands(tuple(self.tensors), tuple(self.inputs), tuple(self.outputs))

    @property
    def is_root(self) -> bool:
        return self.rank == self.call.root

    def overlapping(self) -> None:
        size, kind, way, count = self.size, self.call.kind, self.call.overlap, self.call.counts[0]
        place = {"own": self.rank, "first": 0, "last": size - 1}.get(way, 0)
        if kind in ("gather", "scatter", "all_gather", "reduce_scatter"):
            counts = self.call.counts if kind == "all_gather" else (count,) * size
            starts = [GUARD + sum(counts[:i]) for i in range(size)]
            is_input = kind in ("scatter", "reduce_scatter")
            if kind in ("gather", "scatter") and not self.is_root:
                self.add(count, not is_input, is_input, shape=(count,))
                return
            parts = range(size)
            for part in parts:
                self.place(Tensor(0, starts[part], (counts[part],), (1,)), is_input, not is_input)
            other = self.tensors[place]
            if kind == "all_gather" and other.numel != counts[self.rank]:
                other = self.tensors[self.rank]
            self.place(Tensor(0, other.offset, other.shape, (1,)), not is_input, is_input)
        elif kind == "all_gather_into_tensor":
            self.place(Tensor(0, GUARD + place * count, (count,), (1,)), True, False)
            self.place(Tensor(0, GUARD, (count * size,), (1,)), False, True)
        elif kind == "reduce_scatter_tensor":
            self.place(Tensor(0, GUARD, (count * size,), (1,)), True, False)
            self.place(Tensor(0, GUARD + place * count, (count,), (1,)), False, True)
        elif kind == "all_to_all":
            for part in range(size):
                self.place(Tensor(part, GUARD, (count,), (1,)), True, True)
        elif kind == "all_to_all_single":
            rows, row = count * size, self.call.row
            first = Tensor(0, GUARD, (rows, row), (row, 1))
            if way == "same":
                self.place(first, True, True)
            else:
                self.place(first, True, False)
                self.place(Tensor(0, GUARD + count * row, (rows, row), (row, 1)), False, True)

    def place(self, tensor: Tensor, is_input: bool, is_output: bool) -> None:
        number = len(self.tensors)
        values = f"{self.call.seed} {self.rank} {number}" if is_input else None
        self.tensors.append(
            Tensor(tensor.base, tensor.offset, tensor.shape, tensor.stride, values=values)
        )
        if is_input:
            self.inputs.append(number)
        if is_output:
            self.outputs.append(number)

    def add_list(self, counts: Sequence[int], is_input: bool) -> None:
        for count in counts:
            self.add(count, is_input, not is_input)

    def add(
        self,
        count: int,
        is_input: bool,
        is_output: bool = False,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        number = len(self.tensors)
        # Debug mode compares the shapes of the ranks.
        alike = random.Random(f"shape {self.call.seed} {number}")
        shape = shape or _shape(alike, count)
        is_changed = any(n > 1 for n in shape)
        stride = self.stride(shape, may_expand=is_input and not is_output and is_changed)
        bits = ""
        if (
            self.call.values != "bits"
            and self.rng.random() < 0.08
            and self.call.apis[self.rank] == "native"
        ):
            bits = (
                "conj"
                if self.call.dtype in COMPLEX[:2]
                else "neg"
                if self.call.dtype in FLOATS
                else ""
            )
        values = f"{self.call.seed} {self.rank} {number}" if is_input else None
        mode = self.call.modes[self.rank]
        grad = (
            self.call.requires_grad
            and mode == ("no_grad" if is_output else mode) != "inference"
            and self.rng.random() < 0.5
        )
        offset = GUARD + self.rng.choice((0, 0, 1, 4))
        self.tensors.append(Tensor(number, offset, shape, stride, bits, values, grad))
        if is_input:
            self.inputs.append(number)
        if is_output:
            self.outputs.append(number)

    def stride(self, shape: tuple[int, ...], may_expand: bool) -> tuple[int, ...]:
        rng = self.rng
        way = rng.choice(("plain", "plain", "permuted", "gaps", "padded", "expanded"))
        order = list(range(len(shape)))
        if way == "permuted":
            rng.shuffle(order)
        step = rng.choice((2, 3, 4)) if way == "gaps" else 1
        stride = [0] * len(shape)
        for dim in reversed(order):
            stride[dim] = step
            step = step * max(shape[dim], 1) + (rng.choice((0, 1, 5)) if way == "padded" else 0)
        if way == "expanded" and may_expand:
            wide = [dim for dim, size in enumerate(shape) if size > 1]
            if wide:
                stride[rng.choice(wide)] = 0
        for dim, size in enumerate(shape):
            if size == 1:
                odd = rng.choice((1, 4, 77))
                stride[dim] = odd if self.call.odd_strides else _contiguous(shape)[dim]
        return tuple(stride)


def exchanged(call: Call, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return a rank's send counts and receive counts in an all-to-all."""
    sends = [call.counts[rank * size + peer] for peer in range(size)]
    receives = [call.counts[peer * size + rank] for peer in range(size)]
    return sends, receives


def _shape(rng: random.Random, count: int) -> tuple[int, ...]:
    if count == 0:
        return rng.choice(((0,), (0, 3), (2, 0), (1, 0, 1)))
    if count == 1:
        return rng.choice(((), (1,), (1, 1)))
    divisors = [n for n in range(2, 9) if count % n == 0]
    shapes: list[tuple[int, ...]] = [(count,), (count,), (1, count), (count, 1)]
    if divisors:
        n = rng.choice(divisors)
        shapes += [(n, count // n), (count // n, n), (n, 1, count // n)]
    return rng.choice(shapes)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape)))
