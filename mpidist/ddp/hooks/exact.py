"""Average of all micro-batches' gradients, with the same bits on any number of ranks.

Each backward pass of each rank is one term. A gradient that is accumulated under ``no_sync`` goes
from autograd into an exact sum (``exact_sums``) and is cleared; the averaging pass adds its own
term, and the ranks' sums are added without rounding: the mean over all terms is rounded once, so
neither their order nor their division among ranks changes a bit. Plain gradients are divided by W
and summed in float32, whose last bits depend on both.

For a bucket of N elements each rank sends the tops of its blocks, N gradients as they are or, where
any rank has accumulated, N totals of its sums in float64, to the ranks that round them
(``exact_terms``), and N means. A total of 8 bytes is exact but where terms differ by more than 28
binades; then all ranks send what theirs lack, too. Short buckets are sent to all ranks, with their
tops, and each rank rounds all means: one collective in place of three.

Letters: W ranks; N elements of a bucket.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from mpidist.comm.algorithms.reduce_op import MAX, SUM
from mpidist.comm.group_types import Group
from mpidist.ddp.buckets.weak_hook import weak_hook
from mpidist.ddp.hooks.exact_sums import (
    MOST_TERMS,
    NO_TOP,
    ExactSum,
    bounds_of,
    joined,
    tops_of,
    write_totals,
)
from mpidist.ddp.hooks.exact_terms import write_means
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
        self._sum_memory: dict[str, Tensor] = {}  # of each parameter, parts of those of buckets
        self._bucket_memory: dict[tuple[str, ...], tuple[Tensor, Sequence[Tensor]]] = {}
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
        counts.numpy()[:] = self._own_terms + 1, len(self._sums)
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

    def sum_of(self, names: tuple[str, ...], numels: Sequence[int]) -> ExactSum | None:
        """Remove and return what was accumulated for a bucket's parameters, as one sum."""
        sums = [self._sums.pop(name, None) for name in names]
        self._averaged |= {name for name, held in zip(names, sums, strict=True) if held is not None}
        device = next((held.memory.device for held in sums if held is not None), None)
        if device is None:
            return None
        known = self._bucket_memory.get(names)
        if known is None or known[0].device != device:
            # As many bytes will be needed again before the next average, until buckets are rebuilt.
            for other in [key for key in self._bucket_memory if not {*key}.isdisjoint(names)]:
                del self._bucket_memory[other]
            memory = torch.empty(2, sum(numels), dtype=torch.float64, device=device)
            parts = memory.split(numels, 1)
            known = self._bucket_memory[names] = memory, parts
            self._sum_memory.update(zip(names, parts, strict=True))
        memory, parts = known
        return joined(sums, parts, memory)

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
            self._sums[name] = ExactSum.of(flat, self._sum_memory.get(name))
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
        self._term, self._gradients = bucket.buffer().view(-1), bucket.gradients()
        self._numels = tuple([gradient.numel() for gradient in self._gradients])
        self._bounds = bounds_of(self._numels)
        self._held = state.sum_of(bucket.names(), self._numels)
        self._is_contiguous = all(gradient.is_contiguous() for gradient in self._gradients)
        if not self._is_contiguous:
            # Blocks are those of the elements in the order of the indices.
            self._term = self._memory("term", len(self._term), self._term.dtype)
            for gradient, copy in self._copies(self._term):
                copy.copy_(gradient)
        self._tops, self._is_finite = tops_of(self._term, self._bounds)
        if self._held is not None:
            self._tops = [*map(max, self._tops, self._held.tops)]
            self._is_finite &= self._held.is_finite

    def run(self) -> None:
        """Write the means into the bucket.

        Collective: over the group.
        """
        size, numel = self._group.size, len(self._term)
        dtype = self._term.dtype if self._state.are_terms else torch.float64
        if size > 1 and size * numel * dtype.itemsize <= _SHORT_BYTES:
            rows = self._gather_all(dtype)
            self._round(rows, self._term)
        else:
            self._average_shares(-(-numel // size))
        if not self._is_contiguous:
            for gradient, copy in self._copies(self._term):
                gradient.copy_(copy)

    def _gather_all(self, dtype: torch.dtype) -> Tensor:
        """Return the elements of all ranks, and agree on the tops, by one collective.

        Totals are those at the tops of their rank. Where ranks have different ones, a second
        collective has the totals at the tops of all.
        """
        numel = len(self._term)
        sent = self._memory("sent", numel + 2 + len(self._tops), dtype)
        # Behind the elements whether totals lack something, whether some are not finite, the tops.
        elements, tail = sent.narrow(0, 0, numel), sent.narrow(0, numel, len(sent) - numel)
        is_agreed = False
        while not is_agreed:
            tail.copy_(torch.tensor([0, not self._is_finite, *self._tops]))
            if self._state.are_terms:
                elements.copy_(self._term)
            else:
                self._write_totals(elements, tail[:1])
            rows = self._exchange("rows", sent, len(sent))
            lost, infinite, *tops = zip(*rows[:, numel:].tolist(), strict=True)
            self._tops, self._is_finite = [int(max(found)) for found in tops], not any(infinite)
            # Sums of the terms as they are need no tops.
            is_agreed = self._state.are_terms or all(len({NO_TOP, *found}) <= 2 for found in tops)
        rows = rows.narrow(1, 0, numel)
        if not any(lost):
            return rows
        self._write_totals(elements, tail[:1], True)
        return torch.cat([rows, self._exchange("rest", sent, len(sent)).narrow(1, 0, numel)])

    def _average_shares(self, share: int) -> None:
        """Round a share of the means on each rank, and gather them.

        Ranks round equal shares of the elements, in the order of the blocks.
        """
        group, numel = self._group, len(self._term)
        whole = share * group.size
        means = self._term
        if whole > numel:
            means = self._memory("means", whole, means.dtype)
        self._agree_on_tops()
        if self._state.are_terms:
            if whole > numel:
                means[:numel].copy_(self._term)
            rows = self._exchange("rows", means, share)
        else:
            rows = self._exchange_totals(whole, share)
        mine = means.view(group.size, share)[group.rank]
        self._round(rows, mine, group.rank)
        if group.size > 1:
            group.all_gather_into_tensor(means, mine)
        if whole > numel:
            self._term.copy_(means[:numel])

    def _agree_on_tops(self) -> None:
        """Find the tops over the terms and sums of all ranks, and whether all are finite."""
        if self._group.size == 1:
            return
        host = torch.device("cpu")
        agreed = self._state.memory("tops", len(self._tops) + 1, torch.int32, host)
        agreed.copy_(torch.tensor([*self._tops, not self._is_finite]))
        self._group.all_reduce(agreed, MAX)
        *self._tops, is_infinite = agreed.tolist()
        self._is_finite = not is_infinite

    def _exchange_totals(self, whole: int, share: int) -> Tensor:
        # Behind the totals, whether they lack something.
        totals = self._memory("totals", whole + 1, torch.float64)
        totals, lost = totals[:whole], totals[whole:].zero_()
        self._write_totals(totals, lost)
        rows = self._exchange("rows", totals, share)
        if self._group.size == 1:
            return rows
        is_lost = self._memory("lost", 1, torch.int32).copy_(lost != 0)
        self._group.all_reduce(is_lost, MAX)
        if not is_lost.item():
            return rows
        self._write_totals(totals, lost, True)
        return torch.cat([rows, self._exchange("rest", totals, share)])

    def _write_totals(self, target: Tensor, lost: Tensor, is_rest: bool = False) -> None:
        agreed = self._tops, self._bounds, self._is_finite
        write_totals(self._term, self._held, *agreed, target, lost, is_rest)

    def _round(self, rows: Tensor, means: Tensor, place: int = 0) -> None:
        state = self._state
        write_means(rows, self._tops, self._bounds, means, state.terms, self._is_finite, place)

    def _exchange(self, use: str, sent: Tensor, share: int) -> Tensor:
        """Return the share of all ranks, one row each."""
        size = self._group.size
        if size == 1:
            return sent.view(1, -1)
        rows = self._memory(use, size * share, sent.dtype)
        if share == len(sent):
            self._group.all_gather_into_tensor(rows, sent)
        else:
            self._group.all_to_all_single(rows, sent)
        return rows.view(size, -1)

    def _copies(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return each gradient with its elements in a flat tensor, in the order of the indices."""
        for gradient, part in zip(self._gradients, flat.split(self._numels), strict=True):
            yield gradient, part.view(gradient.shape)

    def _memory(self, use: str, numel: int, dtype: torch.dtype) -> Tensor:
        return self._state.memory(use, numel, dtype, self._term.device)
