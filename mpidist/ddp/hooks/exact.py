"""Average of all micro-batches' gradients, with the same bits on any number of ranks.

Each backward pass of each rank is one term. A gradient that is accumulated under ``no_sync`` goes
from autograd into an exact sum (``exact_sums``) and is cleared; the averaging pass adds its own
term, and the ranks' sums are added without rounding: the mean over all terms is rounded once, so
neither their order nor their division among ranks changes a bit. Plain gradients are divided by W
and summed in float32, whose last bits depend on both.

For a bucket of N elements each rank sends the tops of its blocks, N gradients as they are or, where
any rank has accumulated, N totals of its sums in float64, to the ranks that round them
(``exact_terms``), and N means. A total of 8 bytes is exact but where terms differ by more than 28
binades; then all ranks send what theirs lack, too. Short buckets are sent to all ranks, each of
which rounds all means.

Letters: W ranks; N elements of a bucket.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch

from mpidist.comm.algorithms.reduce_op import MAX, SUM
from mpidist.comm.group_types import Group
from mpidist.ddp.buckets.weak_hook import weak_hook
from mpidist.ddp.hooks.exact_sums import (
    MOST_TERMS,
    NOT_FINITE,
    ExactSum,
    largest_of,
    lengths_of,
    tops_from,
    tops_of,
    write_totals,
)
from mpidist.ddp.hooks.exact_terms import scales_of, write_means
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import in_order, run_stages
from mpidist.future import Future

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Buckets of which all ranks get no more bytes go to all of them: one collective in place of two.
_SHORT_BYTES = 512 << 10


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
        self._sum_memory: dict[str, Tensor] = {}  # of sums that have been averaged
        self._own_terms = 0  # accumulated passes since the last averaging one
        self._averaged: set[str] = set()  # parameters whose sums the last averaging pass has taken
        self._is_accumulating = False  # the running pass has added to a sum
        # The callback of the running pass, which autograd drops when the pass ends by an exception.
        self._ending: weakref.ref[Callable[[], None]] | None = None
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        take = weak_hook(self, ExactAverage.take)
        for name, parameter in named:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(take, name))

    def take(self, name: str, parameter: Tensor) -> None:
        """Move a gradient of a pass that is not averaged into its sum."""
        gradient = parameter.grad
        if gradient is None or self._is_averaging():
            return
        self.begin_pass()
        self._is_accumulating = True
        self._add(name, gradient.detach())
        parameter.grad = None

    def begin_pass(self) -> None:
        """Begin a backward pass; called within it, first from an output's hook, and not only once.

        A nested pass, of a re-entrant checkpoint, would end before the outermost one.
        """
        if self._ending is not None and self._ending() is not None:
            return
        if self._ending is not None:
            warnings.warn(
                "a backward pass of a DistributedDataParallel with exact_average was interrupted "
                "by an exception: the gradients that this rank has accumulated since the last "
                "average are dropped",
                stacklevel=2,
            )
            self._sums.clear()
            self._own_terms, self._is_accumulating = 0, False
        ending = partial(ExactAverage._end_pass, self)
        self._ending = weakref.ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    def accumulated(self) -> set[str]:
        """Return the parameters of which this rank had a sum when the averaging pass began."""
        return self._averaged.union(self._sums)

    def begin(self, group: Group) -> None:
        """Count the terms of all ranks, at the first bucket of an averaging pass.

        Collective: over the group.

        Raises:
            ValueError: There are too many for exact sums (all ranks).
        """
        counts = self.memory("counts", 2, torch.int64, torch.device("cpu"))
        counts.copy_(torch.tensor([self._own_terms + 1, len(self._sums)]))
        group.all_reduce(counts, SUM)
        self._own_terms = 0
        self._averaged.clear()
        self.terms, sums = counts.tolist()
        self.are_terms = self.terms == group.size and not sums
        if self.terms > MOST_TERMS:
            raise ValueError(
                f"exact_average adds at most {MOST_TERMS} backward passes of all ranks exactly; "
                f"got {self.terms}"
            )

    def sum_of(self, name: str) -> ExactSum | None:
        """Remove and return what was accumulated for a parameter."""
        held = self._sums.pop(name, None)
        if held is not None:
            # As many bytes will be needed again before the next average.
            self._sum_memory[name] = held.memory
            self._averaged.add(name)
        return held

    def memory(self, use: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory kept between steps, whose collectives are prepared once."""
        held = self._memory.get((use, dtype))
        if held is None or held.numel() < numel or held.device != device:
            held = self._memory[use, dtype] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel]

    def _add(self, name: str, gradient: Tensor) -> None:
        flat = gradient.float().reshape(-1)
        held = self._sums.get(name)
        if held is None:
            self._sums[name] = ExactSum(flat, self._sum_memory.pop(name, None))
        else:
            held.add(flat)

    def _end_pass(self) -> None:
        self._own_terms += self._is_accumulating
        self._is_accumulating = False
        self._ending = None


@in_order
def exact_average_hook(state: ExactAverage, bucket: GradBucket) -> Future[Tensor]:
    """Replace a bucket by the mean over all backward passes of all ranks since the last average."""
    group, buffer = bucket.group(), bucket.buffer()
    assert group is not None

    def stages() -> None:
        if bucket.index() == 0:
            state.begin(group)
        if buffer.numel():
            _BucketAverage(state, group, bucket).run()

    return run_stages(group, buffer, stages)


class _BucketAverage:
    """Average of one bucket's gradients and of what was accumulated for them."""

    def __init__(self, state: ExactAverage, group: Group, bucket: GradBucket) -> None:
        self._state, self._group = state, group
        self._buffer, self._gradients = bucket.buffer(), bucket.gradients()
        self._flats = [gradient.reshape(-1) for gradient in self._gradients]
        self._sums = [state.sum_of(name) for name in bucket.names()]
        self._lengths = [lengths_of(flat.numel()) for flat in self._flats]
        self._is_finite = True

    def run(self) -> None:
        """Write the means into the bucket.

        Collective: over the group.
        """
        state, group, numel = self._state, self._group, self._buffer.numel()
        dtype = self._buffer.dtype if state.are_terms else torch.float64
        is_short = group.size == 1 or group.size * numel * dtype.itemsize <= _SHORT_BYTES
        # Ranks round equal shares of the elements, in the order of the blocks, or a short bucket.
        share = numel if is_short else -(-numel // group.size)
        whole = share if is_short else share * group.size
        means = self._buffer.view(-1)
        is_copied = whole > numel or not all(g.is_contiguous() for g in self._gradients)
        if is_copied:
            means = self._memory("means", whole, self._buffer.dtype)
            if state.are_terms:
                for flat, copy in zip(self._flats, self._split(means), strict=True):
                    copy.copy_(flat)
        tops, numbers = self._agree_on_tops()
        if state.are_terms:
            rows = self._exchange("rows", means, share)
        else:
            rows = self._exchange_totals(tops, whole, share)
        place = 0 if is_short else group.rank
        mine = means if is_short else means.view(group.size, -1)[place]
        lengths = [length for lengths in self._lengths for length in lengths]
        scales = scales_of(numbers, lengths, rows, place)
        write_means(rows, scales, mine, state.terms, self._is_finite)
        if not is_short:
            group.all_gather_into_tensor(means, mine)
        if is_copied:
            for gradient, copy in zip(self._gradients, self._split(means), strict=True):
                gradient.copy_(copy.view(gradient.shape))

    def _agree_on_tops(self) -> tuple[Tensor, list[int]]:
        """Return the tops of all ranks' terms and sums, twice; find out whether all are finite."""
        largest = [largest_of(flat) for flat in self._flats]
        tops = self._all_tops(tops_from(largest[0] if len(largest) == 1 else torch.cat(largest)))
        numbers: list[int] = tops.tolist()
        self._is_finite = NOT_FINITE not in numbers
        if self._is_finite:
            return tops, numbers
        tops = self._all_tops(torch.cat([tops_of(flat)[0] for flat in self._flats]))
        return tops, tops.tolist()

    def _all_tops(self, terms: Tensor) -> Tensor:
        tops = self._memory("tops", terms.numel(), torch.int32).copy_(terms)
        parts = tops.split([len(lengths) for lengths in self._lengths])
        for part, held in zip(parts, self._sums, strict=True):
            if held is not None:
                torch.maximum(part, held.tops, out=part)
                if self._is_finite and not held.is_finite:
                    part[0] = NOT_FINITE
        self._group.all_reduce(tops, MAX)
        return tops

    def _exchange_totals(self, tops: Tensor, whole: int, share: int) -> Tensor:
        # Behind the totals, whether they lack something; all ranks get that of a short bucket.
        totals = self._memory("totals", whole + 1, torch.float64)
        lost = totals[whole:].zero_()
        self._write_totals(tops, totals, lost, False)
        if self._group.size == 1:
            return totals[:whole].view(1, -1)
        if share == whole:
            rows = self._exchange("rows", totals, whole + 1)
            is_lost = rows[:, whole].any()
        else:
            rows = self._exchange("rows", totals[:whole], share)
            is_lost = self._memory("lost", 1, torch.int32).copy_(lost != 0)
            self._group.all_reduce(is_lost, MAX)
        if not is_lost.item():
            return rows[:, :share]
        self._write_totals(tops, totals, lost, True)
        return torch.cat([rows[:, :share], self._exchange("rest", totals[:whole], share)])

    def _write_totals(self, tops: Tensor, target: Tensor, lost: Tensor, is_rest: bool) -> None:
        tops_of_each = tops.split([len(lengths) for lengths in self._lengths])
        targets = self._split(target)
        for flat, held, mine, part in zip(
            self._flats, self._sums, tops_of_each, targets, strict=True
        ):
            write_totals(flat, held, mine, self._is_finite, part, lost, is_rest)

    def _exchange(self, use: str, sent: Tensor, share: int) -> Tensor:
        """Return the share of all ranks, one row each."""
        size = self._group.size
        if size == 1:
            return sent.view(1, -1)
        rows = self._memory(use, size * share, sent.dtype)
        if share == sent.numel():
            self._group.all_gather_into_tensor(rows, sent)
        else:
            self._group.all_to_all_single(rows, sent)
        return rows.view(size, -1)

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return one view for each gradient's elements, in order."""
        numel = self._buffer.numel()
        return flat[:numel].split([part.numel() for part in self._flats])

    def _memory(self, use: str, numel: int, dtype: torch.dtype) -> Tensor:
        return self._state.memory(use, numel, dtype, self._buffer.device)
