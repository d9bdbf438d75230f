"""Average of all micro-batches' gradients, with the same bits on any number of ranks.

Each backward pass of each rank is one term. A gradient that is accumulated under ``no_sync`` goes
from autograd into an exact sum (``exact_sums``) and is cleared; the averaging pass adds its own
term, and the ranks' sums are added without rounding: the mean over all terms is rounded once, so
neither their order nor their division among ranks changes a bit. Plain gradients are divided by W
and summed in float32, whose last bits depend on both.

For a bucket of N elements each rank sends the tops of its blocks, 16·N bytes of sums to the ranks
that round them, and N means. Where no rank has accumulated, it sends the N gradients as they are,
and the rank that rounds them cuts and adds them (``exact_terms``), with the same bits.

Letters: W ranks; N elements of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from mpidist.comm.algorithms.reduce_op import MAX, SUM
from mpidist.comm.group_types import Group
from mpidist.ddp.buckets.weak_hook import weak_hook
from mpidist.ddp.hooks.exact_sums import (
    MOST_TERMS,
    ExactSum,
    blocks_of,
    cut,
    largest_of,
    lengths_of,
    tops_from,
    tops_of,
)
from mpidist.ddp.hooks.exact_terms import scales_of, write_means
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import in_order, run_stages
from mpidist.future import Future

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ExactAverage:
    """Exact sums of one module's gradients between two averaging passes.

    Args:
        named: The parameters by name.
        is_averaging: Returns whether the backward pass that runs now is averaged.

    Attributes:
        terms: Number of backward passes of all ranks whose mean the buckets of the running pass
            get.
        are_terms: No rank holds a sum: each has one term, its gradient in the running pass.

    Raises:
        ValueError: A parameter has a dtype whose sums this does not keep exactly.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], is_averaging: Callable[[], bool]
    ) -> None:
        named = list(named)
        wrong = [f"{name} ({p.dtype})" for name, p in named if p.dtype not in DTYPES]
        if wrong:
            raise ValueError(
                "exact_average needs parameters of float32, bfloat16 or float16; got "
                f"{', '.join(wrong[:10])}"
            )
        self.terms = 0
        self.are_terms = False
        self._is_averaging = is_averaging
        self._sums: dict[str, ExactSum] = {}
        self._own_terms = 0  # accumulated passes since the last averaging one
        self._is_counted = False  # the running one is among them
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}
        take = weak_hook(self, ExactAverage.take)
        for name, parameter in named:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(take, name))

    def take(self, name: str, parameter: Tensor) -> None:
        """Move a gradient of a pass that is not averaged into its sum."""
        gradient = parameter.grad
        if gradient is None or self._is_averaging():
            return
        if not self._is_counted:
            self._is_counted = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        self._add(name, gradient.detach())
        parameter.grad = None

    def begin(self, group: Group) -> None:
        """Count the terms of all ranks, at the first bucket of an averaging pass.

        Collective: over the group.

        Raises:
            ValueError: There are too many for exact sums (all ranks).
        """
        counts = torch.tensor([self._own_terms + 1, len(self._sums)])
        group.all_reduce(counts, SUM)
        self._own_terms = 0
        self.terms, sums = counts.tolist()
        self.are_terms = self.terms == group.size and not sums
        if self.terms > MOST_TERMS:
            raise ValueError(
                f"exact_average adds at most {MOST_TERMS} backward passes of all ranks exactly; "
                f"got {self.terms}"
            )

    def sum_of(self, name: str) -> ExactSum | None:
        """Remove and return what was accumulated for a parameter."""
        return self._sums.pop(name, None)

    def memory(self, use: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for one of the pieces of a bucket, kept between steps."""
        held = self._memory.get((use, dtype))
        if held is None or held.numel() < numel or held.device != device:
            held = self._memory[use, dtype] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel]

    def _add(self, name: str, gradient: Tensor) -> None:
        flat = gradient.float().reshape(-1)
        held = self._sums.get(name)
        if held is None:
            self._sums[name] = ExactSum(flat)
        else:
            held.add(flat)

    def _end_pass(self) -> None:
        self._own_terms += 1
        self._is_counted = False


@in_order
def exact_average_hook(state: ExactAverage, bucket: GradBucket) -> Future[Tensor]:
    """Replace a bucket by the mean over all backward passes of all ranks since the last average."""
    group, buffer = bucket.group(), bucket.buffer()
    assert group is not None

    def stages() -> None:
        if bucket.index() == 0:
            state.begin(group)
        if buffer.numel() and not (state.are_terms and _average_terms(state, group, bucket)):
            _average_sums(state, group, bucket)

    return run_stages(group, buffer, stages)


class _Part(NamedTuple):
    """One parameter's share of a bucket: its gradient's blocks, and their places in the pieces."""

    name: str
    gradient: Tensor
    blocks: Tensor
    first_block: int
    start: int
    end: int


def _average_terms(state: ExactAverage, group: Group, bucket: GradBucket) -> bool:
    """Average gradients that are all ranks' only terms; return False if one is not finite."""
    buffer, gradients = bucket.buffer(), bucket.gradients()
    largest = torch.cat([largest_of(gradient.reshape(-1)) for gradient in gradients]).float()
    is_infinite = largest.isfinite().logical_not_().any()
    # All ranks see one that is not finite on any.
    tops = torch.cat([tops_from(largest), is_infinite.int().view(1)])
    group.all_reduce(tops, MAX)
    if tops[-1]:
        return False
    numel, size = buffer.numel(), group.size
    whole = numel + -numel % size
    # Ranks round equal shares of the elements, in the order of the blocks.
    is_copied = whole > numel or not all(gradient.is_contiguous() for gradient in gradients)
    flat = buffer.view(-1)
    if is_copied:
        flat = state.memory(0, whole, buffer.dtype, buffer.device)
        flat[numel:].zero_()
        for gradient, copy in zip(gradients, _views(flat, gradients), strict=True):
            copy.copy_(gradient)
    terms, share = flat, flat.view(size, -1)[group.rank]
    if size > 1:
        terms = state.memory(1, whole, buffer.dtype, buffer.device)
        group.all_to_all_single(terms, flat)
    lengths = [length for gradient in gradients for length in lengths_of(gradient.numel())]
    scales = scales_of(tops[:-1], lengths, size, share.numel(), group.rank)
    write_means(terms.view(size, -1), scales, share)
    if size > 1:
        group.all_gather_into_tensor(flat, share)
    if is_copied:
        for gradient, copy in zip(gradients, _views(flat, gradients), strict=True):
            gradient.copy_(copy)
    return True


def _views(flat: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return one contiguous view of ``flat`` for each gradient, in its shape."""
    ends = accumulate(gradient.numel() for gradient in gradients)
    return [
        flat[end - gradient.numel() : end].view(gradient.shape)
        for end, gradient in zip(ends, gradients, strict=True)
    ]


def _average_sums(state: ExactAverage, group: Group, bucket: GradBucket) -> None:
    parts, numel = _parts_of(bucket)
    device = bucket.buffer().device
    held = [state.sum_of(part.name) for part in parts]
    found = [tops_of(part.blocks) for part in parts]
    tops = torch.cat(
        [
            own if before is None else torch.maximum(own, before.tops)
            for (own, _), before in zip(found, held, strict=True)
        ]
    )
    group.all_reduce(tops, MAX)
    # Ranks round equal shares.
    whole = numel + -numel % group.size
    high, low = (state.memory(use, whole, torch.float64, device) for use in (0, 1))
    high[numel:].zero_()
    low[numel:].zero_()
    for part, before, (_, is_finite) in zip(parts, held, found, strict=True):
        shape = part.blocks.shape
        mine = tops[part.first_block : part.first_block + len(part.blocks)]
        pieces = [piece[part.start : part.end].view(shape) for piece in (high, low)]
        cut(part.blocks, mine, is_finite, *pieces)
        if before is not None:
            before.raise_to(mine)
            pieces[0] += before.high
            pieces[1] += before.low
    means = state.memory(2, whole, torch.float32, device)
    share = means.view(group.size, -1)[group.rank]
    if group.size > 1:
        sums = [state.memory(use, share.numel(), torch.float64, device) for use in (3, 4)]
        for total, piece in zip(sums, (high, low), strict=True):
            group.reduce_scatter_tensor(total, piece, SUM)
    else:
        sums = [high, low]
    share.copy_(sums[0].add_(sums[1]).div_(state.terms))
    if group.size > 1:
        group.all_gather_into_tensor(means, share)
    for part in parts:
        part.gradient.copy_(means[part.start :][: part.gradient.numel()].view_as(part.gradient))


def _parts_of(bucket: GradBucket) -> tuple[list[_Part], int]:
    """Return a bucket's gradients in blocks, and the number of elements of all blocks."""
    parts, blocks_before, start = [], 0, 0
    for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
        blocks = blocks_of(gradient.float().reshape(-1))
        end = start + blocks.numel()
        parts.append(_Part(name, gradient, blocks, blocks_before, start, end))
        blocks_before, start = blocks_before + len(blocks), end
    return parts, start
