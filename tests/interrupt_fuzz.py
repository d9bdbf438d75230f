"""Fuzzing of interrupts: a signal handler raises in a collective, at a random moment, on one rank.

mpirun -n 2 python -m tests.interrupt_fuzz --seconds 300 --seed 0

Each round makes a group, whose calls are non-blocking ones of MPI, and calls one collective. A rank
is interrupted in it, and another may be late. Afterwards the group is usable on a rank, and the
same call gives the right data, or each later call raises the group's failure; a new group gives the
right data; and memory that was allocated behind the call has what the program has written. With
``MALLOC_PERTURB_`` (``make interrupt-fuzz``) memory that is read after its end is noticed, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import mpidist.comm
from mpidist.errors import MpidistError

_LONGEST_S = 0.02  # of a delay before the interrupt, or of a late rank
_PATIENCE_S = 1.0  # of a rank whose peer has left the call
_NUMELS = (1, 300, 3000, 40_000, 300_000)
_DTYPES = (torch.float32, torch.bfloat16, torch.int64)

Call = Callable[[], Any]
# Of a collective: its call, and a function that returns whether its results are right.
Made = tuple[Call, Callable[[], bool]]


class Interrupt(BaseException):
    """As KeyboardInterrupt, or SystemExit of a handler of SIGTERM."""


def _raise(number: int, frame: object) -> None:
    raise Interrupt


def _all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def collectives(group: Any, numel: int, dtype: torch.dtype, base: int) -> dict[str, Made]:
    """Return the collectives of a group by name; all ranks' values depend on ``base``."""
    rank, size, last = group.rank, group.size, group.size - 1
    total = float(sum(base + other for other in range(size)))

    def mine() -> torch.Tensor:
        return torch.full((numel,), base + rank, dtype=dtype)

    def many() -> list[torch.Tensor]:
        return [torch.full((numel,), base + rank * size + to, dtype=dtype) for to in range(size)]

    def zeros(count: int = 1) -> list[torch.Tensor]:
        return [torch.zeros(numel, dtype=dtype) for _ in range(count)]

    def by_rank(tensors: Sequence[torch.Tensor]) -> bool:
        return all(_all(one, base + other) for other, one in enumerate(tensors))

    reduced, coalesced, one, flat = mine(), [mine(), mine()], mine(), torch.cat(zeros(size))
    (part,), (shard,), (own,) = zeros(), zeros(), zeros()
    gathered, at_root, swapped = zeros(size), zeros(size), zeros(size)
    sends, sums = many(), [mine() for _ in range(size)]
    exchanged, source = torch.cat(zeros(size)), torch.cat(many())
    objects: list[object] = []

    def keep(call: Call) -> Call:
        return lambda: objects.append(call())

    return {
        "all_reduce": (lambda: group.all_reduce(reduced), lambda: _all(reduced, total)),
        "all_reduce_coalesced": (
            lambda: group.all_reduce_coalesced(coalesced),
            lambda: all(_all(each, total) for each in coalesced),
        ),
        "reduce": (
            lambda: group.reduce(own.copy_(mine()), 0),
            lambda: rank != 0 or _all(own, total),
        ),
        "broadcast": (lambda: group.broadcast(one, last), lambda: _all(one, base + last)),
        "all_gather": (lambda: group.all_gather(gathered, mine()), lambda: by_rank(gathered)),
        "all_gather_into_tensor": (
            lambda: group.all_gather_into_tensor(flat, mine()),
            lambda: by_rank(flat.chunk(size)),
        ),
        "gather": (
            lambda: group.gather(mine(), at_root if rank == last else None, last),
            lambda: rank != last or by_rank(at_root),
        ),
        "scatter": (
            lambda: group.scatter(part, sends if rank == 0 else None, 0),
            lambda: _all(part, base + rank),
        ),
        "reduce_scatter": (
            lambda: group.reduce_scatter(shard, sums),
            lambda: _all(shard, total),
        ),
        "reduce_scatter_tensor": (
            lambda: group.reduce_scatter_tensor(shard, torch.cat(sums)),
            lambda: _all(shard, total),
        ),
        "all_to_all": (
            lambda: group.all_to_all(swapped, sends),
            lambda: all(_all(t, base + r * size + rank) for r, t in enumerate(swapped)),
        ),
        "all_to_all_single": (
            lambda: group.all_to_all_single(exchanged, source),
            lambda: all(
                _all(t, base + r * size + rank) for r, t in enumerate(exchanged.chunk(size))
            ),
        ),
        "barrier": (group.barrier, lambda: True),
        "all_gather_object": (
            keep(lambda: group.all_gather_object([base + rank] * min(numel, 3000))),
            lambda: [each[0] for each in objects[-1]] == [base + r for r in range(size)],
        ),
        "broadcast_object": (
            keep(lambda: group.broadcast_object([base] * numel if rank == 0 else None, 0)),
            lambda: objects[-1] == [base] * numel,
        ),
        "all_reduce, waited for": (
            lambda: group.all_reduce(reduced, async_op=True).wait(),
            lambda: _all(reduced, total),
        ),
        "broadcast, waited for": (
            lambda: group.broadcast(one, last, async_op=True).wait(),
            lambda: _all(one, base + last),
        ),
        "all_gather, waited for": (
            lambda: group.all_gather(gathered, mine(), async_op=True).wait(),
            lambda: by_rank(gathered),
        ),
    }


def _interrupted(call: Call, after_s: float) -> bool:
    """Call a function, in which a signal handler raises after a time; return whether it ended."""
    is_over = False
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        call()
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    except MpidistError:  # the other rank's end, told by MPI
        signal.setitimer(signal.ITIMER_REAL, 0)
    return is_over


def _error(call: Call) -> str:
    try:
        call()
    except MpidistError as error:
        return str(error)
    return "no error"


def run_round(world: Any, seed: int) -> str:
    """Run one round; return its outcome.

    Collective: over the world, with the same seed.

    Raises:
        AssertionError: Wrong data, or a group that is neither usable nor failed.
    """
    drawn = random.Random(seed)
    base, numel, dtype = drawn.randrange(1, 90), drawn.choice(_NUMELS), drawn.choice(_DTYPES)
    if dtype is torch.bfloat16:
        base %= 30
    victim, late, warm = (
        drawn.randrange(world.size),
        drawn.randrange(-1, world.size),
        drawn.random(),
    )
    after_s = _LONGEST_S * drawn.random() ** 3 + 1e-6
    late_s = _LONGEST_S * drawn.random()
    group = world.clone(f"round {seed}", on_timeout="raise")
    names = list(collectives(group, 1, dtype, base))
    name = drawn.choice(names)
    call, is_right = collectives(group, numel, dtype, base)[name]
    what = f"round {seed}: {name} of {numel} {dtype}, rank {victim} interrupted"
    if warm < 0.5:
        # The fast path prepares what comes twice; a sum is no longer ``base``'s afterwards.
        for _ in range(2):
            group.barrier()
    if world.rank == late:
        time.sleep(late_s)
    is_over = _interrupted(call, after_s if world.rank == victim else _PATIENCE_S)
    fresh = [torch.zeros(count) for count in (1, 300, 3000, 40_000, 300_000) for _ in range(3)]
    assert not is_over or is_right(), f"{what}: wrong data"
    failure = group._state.failure
    begun = group._state.journal.sequence + len(group._progress.items)
    states = world.all_gather_object((is_over, failure is None, begun))
    if all(is_usable for _, is_usable, _ in states):
        if begun < max(begun for _, _, begun in states):
            # The interrupt came before the call had begun, and the others' has ended.
            call()
            assert is_right(), f"{what}: wrong data of the call that is made again"
        again, is_right_again = collectives(group, numel, dtype, base + 1)[name]
        again()
        assert is_right_again(), f"{what}: wrong data of the next call"
        outcome = "ended" if all(over for over, _, _ in states) else "usable"
    else:
        outcome = "failed"
        if failure is not None:
            for later in (call, group.barrier):
                text = _error(later)
                assert text == str(failure), f"{what}: {text} in place of {failure}"
    world.barrier()
    other = world.clone(f"behind {seed}", on_timeout="raise")
    again, is_right_again = collectives(other, numel, dtype, base + 2)[name]
    again()
    assert is_right_again(), f"{what}: wrong data of another group"
    other.close()
    world.barrier()
    assert all(_all(each, 0) for each in fresh), f"{what}: memory of the program was overwritten"
    group.close()
    return outcome


def run(world: Any, seeds: Sequence[int] | Any, is_due: Callable[[], bool]) -> Counter[str]:
    """Run rounds until they or the time are over; return their outcomes.

    Collective: over the world.
    """
    outcomes: Counter[str] = Counter()
    former = signal.signal(signal.SIGALRM, _raise)
    try:
        for seed in seeds:
            if world.broadcast_object(is_due(), 0):
                break
            outcomes[run_round(world, seed)] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    return outcomes


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.interrupt_fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0, help="the first round's")
    options = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(options.seconds + 120, exit=True)
    world = mpidist.comm.init()
    end = time.monotonic() + options.seconds
    outcomes = run(world, itertools.count(options.seed), lambda: time.monotonic() > end)
    if world.rank == 0:
        print(f"{outcomes.total()} rounds: {dict(outcomes)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
