"""Kernels that move tensors, against torch and against a plain copy of as many bytes.

The cases: many tensors into one flat buffer and back, and sums across dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from harness.timing import Contender
from mpidist.kernels.accumulate import accumulate
from mpidist.kernels.pack import pack, unpack
from training.gradient_lists import LISTS, Shape, cut

Tensor = torch.Tensor
Call = Callable[[], object]

OURS, THEIRS, COPY = "mpidist", "torch", "device copy"
# Passes rotate over buffers of this total size, so that no GPU cache holds the next input.
_COLD_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    """One operation on one list of tensors."""

    operation: str
    tensors_of: str
    tensors: int
    dtypes: str  # dtypes of the tensors and of the flat buffer
    size_bytes: int  # size of the tensors in fp32
    moved_bytes: int  # least number of bytes that one call reads and writes
    contenders: list[Contender]
    # Returns the names of contenders with wrong results.
    wrong: Callable[[], list[str]]


class Buffers:
    """Tensors of a list, and a flat buffer of their size."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = [torch.randn(shape, device=device) for shape in shapes]
        self.parts = [tensor.view(-1) for tensor in self.tensors]
        self.truth = torch.cat(self.parts).to(dtype)
        self.flat = torch.empty_like(self.truth)
        self.views = list(self.flat.split([part.numel() for part in self.parts]))


def cases(lists: Sequence[str], sizes_bytes: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Yield all cases; the memory of one is freed when the next is built."""
    for size_bytes in sizes_bytes:
        for name in lists:
            shapes = cut(LISTS[name](), size_bytes // 4)
            for dtype in (torch.float32, torch.bfloat16):
                yield from _both_ways(name, shapes, size_bytes, dtype, device)
        for y, x in (
            (torch.float32, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16),
        ):
            yield _accumulation(size_bytes, y, x, device)


def _both_ways(
    name: str, shapes: Sequence[Shape], size_bytes: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    moved_bytes = sum(math.prod(shape) for shape in shapes) * (4 + dtype.itemsize)
    sets = [Buffers(shapes, dtype, device) for _ in range(_sets(moved_bytes, device))]
    copies = _copies(moved_bytes, len(sets), device)
    about = (name, len(shapes), f"float32, {_name(dtype)}", size_bytes, moved_bytes)

    calls: dict[str, list[Call]] = {
        OURS: [partial(pack, s.tensors, s.flat) for s in sets],
        THEIRS: [partial(torch._foreach_copy_, s.views, s.parts) for s in sets],
    }
    results = [(s.flat, s.truth) for s in sets]
    yield Case(
        "pack", *about, [*_contenders(calls), copies], partial(_wrong, calls, lambda: results)
    )

    calls = {
        OURS: [partial(unpack, s.flat, s.tensors) for s in sets],
        THEIRS: [partial(torch._foreach_copy_, s.parts, s.views) for s in sets],
    }
    for s in sets:
        s.flat.copy_(s.truth)
    pairs = [
        pair
        for s in sets
        for pair in zip(s.parts, s.truth.float().split([p.numel() for p in s.parts]), strict=True)
    ]
    yield Case(
        "unpack", *about, [*_contenders(calls), copies], partial(_wrong, calls, lambda: pairs)
    )


def _accumulation(size_bytes: int, y: torch.dtype, x: torch.dtype, device: torch.device) -> Case:
    numel = size_bytes // 4
    moved_bytes = numel * (2 * y.itemsize + x.itemsize)
    sets = [(torch.zeros(numel, dtype=y, device=device), torch.randn(numel, device=device).to(x))]
    target, source = sets[0]
    copies = _sets(moved_bytes, device) - 1
    sets += [(target.clone(), source.clone()) for _ in range(copies)]
    calls: dict[str, list[Call]] = {
        OURS: [partial(accumulate, *pair) for pair in sets],
        THEIRS: [partial(pair[0].add_, pair[1]) for pair in sets],
    }

    def results() -> list[tuple[Tensor, Tensor]]:
        # ``_wrong`` has left arbitrary values in y; the sums need a defined start.
        for target, _ in sets:
            target.fill_(0.5)
        return [(target, (0.5 + term.float()).to(y)) for target, term in sets]

    copies = _copies(moved_bytes, len(sets), device)
    wrong = partial(_wrong, calls, results)
    return Case(
        "accumulate",
        "one tensor",
        1,
        f"{_name(y)}, {_name(x)}",
        size_bytes,
        moved_bytes,
        [*_contenders(calls), copies],
        wrong,
    )


def _sets(moved_bytes: int, device: torch.device) -> int:
    return max(_COLD_BYTES // moved_bytes, 1) if device.type == "cuda" else 1


def _copies(moved_bytes: int, count: int, device: torch.device) -> Contender:
    pairs = [torch.randn(2, moved_bytes // 8, device=device) for _ in range(count)]
    return Contender(COPY, tuple(partial(to.copy_, source) for to, source in pairs), ())


def _contenders(calls: dict[str, list[Call]]) -> list[Contender]:
    return [Contender(name, tuple(own), ()) for name, own in calls.items()]


def _wrong(
    calls: dict[str, list[Call]], results: Callable[[], list[tuple[Tensor, Tensor]]]
) -> list[str]:
    """Run each contender on memory full of NaN; return the names of those with wrong results."""
    names = []
    for name, own in calls.items():
        for got, _ in results():
            got.fill_(math.nan)
        pairs = results()
        for call in own:
            call()
        if not all(torch.equal(got, truth) for got, truth in pairs):
            names.append(name)
    return names


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
