"""Collectives under test: buffers, contenders on these buffers, and expected contents.

Letters: W ranks; N elements of one contribution. ``size_bytes`` counts the N fp32 elements: a
rank's input of an all-gather, a rank's output of a reduce-scatter, or a rank's message to each peer
of an all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from collectives.case import FP32_BYTES, BarrierCase, Case, Ways
from harness.timing import Contender

# Values are 0 to 12, so that sums over ranks are exact in fp32.
_PERIOD = 13

# torch 2.13 renamed these two functions; each call of an old name costs a warning.
_all_gather_into_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce(ways: Ways, numel: int) -> Case:
    tensor, own = torch.empty(numel), _pattern(ways.rank, numel)
    total = _total(ways, numel)
    calls = {
        "gloo": partial(dist.all_reduce, tensor, group=ways.gloo),
        "mpi4py": partial(ways.raw.Allreduce, ways.mpi.IN_PLACE, _spec(ways, tensor)),
        "mpidist": partial(dist.all_reduce, tensor),
        "native": partial(ways.native.all_reduce, tensor),
    }
    return Case("all_reduce", numel, _single(calls, tensor), [(tensor, own)], lambda k: total)


def all_reduce_bf16(ways: Ways, numel: int) -> Case:
    """Use bf16, which has no MPI datatype: against Gloo, and against fp32 with as many elements."""
    half, full = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel)
    own, total = _pattern(ways.rank, numel), _total(ways, numel)
    calls = {
        "gloo": partial(dist.all_reduce, half, group=ways.gloo),
        "mpidist": partial(dist.all_reduce, half),
        "native": partial(ways.native.all_reduce, half),
    }
    calls_fp32 = {
        "mpidist fp32": partial(dist.all_reduce, full),
        "native fp32": partial(ways.native.all_reduce, full),
    }
    contenders = _single(calls, half) + _single(calls_fp32, full)
    return Case("all_reduce_bf16", numel, contenders, [(half, own), (full, own)], lambda k: total)


def broadcast(ways: Ways, numel: int) -> Case:
    """Rotate the root: a fixed root would run ahead, so that a burst would measure send buffers."""
    tensor, own = torch.empty(numel), _pattern(ways.rank, numel)
    spec, roots = _spec(ways, tensor), range(ways.size)
    calls = {
        "gloo": [partial(dist.broadcast, tensor, root, group=ways.gloo) for root in roots],
        "mpi4py": [partial(ways.raw.Bcast, spec, root) for root in roots],
        "mpidist": [partial(dist.broadcast, tensor, root) for root in roots],
        "native": [partial(ways.native.broadcast, tensor, root) for root in roots],
    }
    return Case(
        "broadcast",
        numel,
        _several(calls, tensor),
        [(tensor, own)],
        lambda root: _pattern(root, numel),
    )


def reduce(ways: Ways, numel: int) -> Case:
    """Rotate the root, as in broadcast."""
    tensor, own = torch.empty(numel), _pattern(ways.rank, numel)
    spec, roots, total = _spec(ways, tensor), range(ways.size), _total(ways, numel)

    def raw(root: int) -> Callable[[], object]:
        if ways.rank == root:
            return partial(ways.raw.Reduce, ways.mpi.IN_PLACE, spec, ways.mpi.SUM, root)
        return partial(ways.raw.Reduce, spec, None, ways.mpi.SUM, root)

    calls = {
        "gloo": [partial(dist.reduce, tensor, root, group=ways.gloo) for root in roots],
        "mpi4py": [raw(root) for root in roots],
        "mpidist": [partial(dist.reduce, tensor, root) for root in roots],
        "native": [partial(ways.native.reduce, tensor, root) for root in roots],
    }
    # The tensors of the other ranks are undefined afterwards.
    return Case(
        "reduce",
        numel,
        _several(calls, tensor),
        [(tensor, own)],
        lambda root: total if root == ways.rank else None,
    )


def all_gather_into_tensor(ways: Ways, numel: int) -> Case:
    source, target = torch.empty(numel), torch.empty(ways.size * numel)
    calls = {
        "gloo": partial(_all_gather_into_tensor, target, source, group=ways.gloo),
        "mpi4py": partial(ways.raw.Allgather, _spec(ways, source), _spec(ways, target)),
        "mpidist": partial(_all_gather_into_tensor, target, source),
        "native": partial(ways.native.all_gather_into_tensor, target, source),
    }
    inputs = [(source, _pattern(ways.rank, numel))]
    return Case(
        "all_gather_into_tensor",
        numel,
        _single(calls, target),
        inputs,
        lambda k: _patterns(ways, numel),
    )


def all_gather(ways: Ways, numel: int) -> Case:
    """Gather into lists. MPI has none: mpi4py gathers into one buffer, which is less work."""
    source, flat = torch.empty(numel), torch.empty(ways.size * numel)
    targets = [torch.empty(numel) for _ in range(ways.size)]
    calls = {
        "gloo": partial(dist.all_gather, targets, source, group=ways.gloo),
        "mpidist": partial(dist.all_gather, targets, source),
        "native": partial(ways.native.all_gather, targets, source),
    }
    raw = partial(ways.raw.Allgather, _spec(ways, source), _spec(ways, flat))
    gloo, *ours = _single(calls, *targets)
    contenders = [gloo, *_single({"mpi4py": raw}, flat), *ours]
    inputs = [(source, _pattern(ways.rank, numel))]
    return Case("all_gather", numel, contenders, inputs, lambda k: _patterns(ways, numel))


def reduce_scatter_tensor(ways: Ways, numel: int) -> Case:
    source, target = torch.empty(ways.size * numel), torch.empty(numel)
    calls = {
        "gloo": partial(_reduce_scatter_tensor, target, source, group=ways.gloo),
        "mpi4py": partial(ways.raw.Reduce_scatter_block, _spec(ways, source), _spec(ways, target)),
        "mpidist": partial(_reduce_scatter_tensor, target, source),
        "native": partial(ways.native.reduce_scatter_tensor, target, source),
    }
    inputs = [(source, _pattern(ways.rank, ways.size * numel))]
    own = _total(ways, ways.size * numel)[ways.rank * numel : (ways.rank + 1) * numel]
    return Case("reduce_scatter_tensor", numel, _single(calls, target), inputs, lambda k: own)


def all_to_all_single(ways: Ways, numel: int) -> Case:
    source, target = torch.empty(ways.size * numel), torch.empty(ways.size * numel)
    calls = {
        "gloo": partial(dist.all_to_all_single, target, source, group=ways.gloo),
        "mpi4py": partial(ways.raw.Alltoall, _spec(ways, source), _spec(ways, target)),
        "mpidist": partial(dist.all_to_all_single, target, source),
        "native": partial(ways.native.all_to_all_single, target, source),
    }
    inputs = [(source, _pattern(ways.rank, ways.size * numel))]
    own = slice(ways.rank * numel, (ways.rank + 1) * numel)
    parts = [_pattern(peer, ways.size * numel)[own] for peer in range(ways.size)]
    return Case(
        "all_to_all_single", numel, _single(calls, target), inputs, lambda k: np.concatenate(parts)
    )


def ping_pong(ways: Ways, numel: int) -> Case:
    """Send a tensor from the first rank to the last and back; a call is one way.

    The other ranks make no calls.
    """
    tensor, own, last = torch.empty(numel), _pattern(ways.rank, numel), ways.size - 1
    spec = _spec(ways, tensor)
    players = {0: last, last: 0}
    peer = players.get(ways.rank, 0)
    pairs = {
        "gloo": (
            partial(dist.send, tensor, peer, group=ways.gloo),
            partial(dist.recv, tensor, peer, group=ways.gloo),
        ),
        "mpi4py": (partial(ways.raw.Send, spec, peer), partial(ways.raw.Recv, spec, peer)),
        "mpidist": (partial(dist.send, tensor, peer), partial(dist.recv, tensor, peer)),
        "native": (
            partial(ways.native.send, tensor, peer),
            partial(ways.native.recv, tensor, peer),
        ),
    }
    calls: dict[str, Sequence[Callable[[], object]]] = {name: () for name in pairs}
    if ways.rank in players:
        calls = {name: pair if ways.rank == 0 else pair[::-1] for name, pair in pairs.items()}
    # Rank 0 sends first, so both ranks have its values; after the reply both have the last rank's.
    return Case(
        "ping_pong",
        numel,
        _several(calls, tensor),
        [(tensor, own)],
        lambda k: _pattern(last if k else 0, numel),
    )


def barrier(ways: Ways, numel: int) -> Case:
    calls = {
        "gloo": partial(dist.barrier, group=ways.gloo),
        "mpi4py": ways.raw.Barrier,
        "mpidist": dist.barrier,
        "native": ways.native.barrier,
    }
    return BarrierCase("barrier", 0, _single(calls))


OPERATIONS: dict[str, Callable[[Ways, int], Case]] = {
    make.__name__: make
    for make in (
        all_reduce,
        all_reduce_bf16,
        broadcast,
        reduce,
        all_gather_into_tensor,
        all_gather,
        reduce_scatter_tensor,
        all_to_all_single,
        ping_pong,
        barrier,
    )
}


def cases_of(operation: str, ways: Ways, sizes_bytes: Sequence[int]) -> list[partial[Case]]:
    """Return factories of an operation's cases, so that only one case's buffers exist at once."""
    make = OPERATIONS[operation]
    sizes = [0] if make is barrier else sizes_bytes
    return [partial(make, ways, size // FP32_BYTES) for size in sizes]


def _pattern(rank: int, numel: int) -> np.ndarray:
    return _repeat((np.arange(_PERIOD) + rank) % _PERIOD, numel)


def _patterns(ways: Ways, numel: int) -> np.ndarray:
    return np.concatenate([_pattern(rank, numel) for rank in range(ways.size)])


def _total(ways: Ways, numel: int) -> np.ndarray:
    return _repeat(np.sum([_pattern(rank, _PERIOD) for rank in range(ways.size)], axis=0), numel)


def _repeat(period: np.ndarray, numel: int) -> np.ndarray:
    return np.tile(period.astype(np.float32), -(-numel // _PERIOD))[:numel]


def _spec(ways: Ways, tensor: torch.Tensor) -> list[Any]:
    # Naming the datatype saves mpi4py a lookup of 1 us per call.
    return [tensor.numpy(), ways.mpi.FLOAT]


def _single(calls: dict[str, Callable[[], object]], *outputs: torch.Tensor) -> list[Contender]:
    return [Contender(name, (call,), outputs) for name, call in calls.items()]


def _several(
    calls: dict[str, Sequence[Callable[[], object]]], *outputs: torch.Tensor
) -> list[Contender]:
    return [Contender(name, tuple(several), outputs) for name, several in calls.items()]
