"""Plan of a soak as data. Pure: a seed gives one series of worlds, the same on all ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = (
    "collectives",  # a program of tests.fuzz: all collectives, messages, groups, threads
    "groups",  # groups that several threads of each rank make and close at the same time
    "ddp",  # a model of tests.fuzz: both DDPs, hooks, join
    "oss",  # a sharded optimizer, and its state on one rank, on all, and in the background
    "commit",  # the state in the nodes' memory, and back
    "save",  # the state on the disk, and back
    "calls",  # graphs of calls, references and errors
    "autograd",  # backward passes over the workers
)
# How a world begins: again among the same ranks, as that of a communicator (in the job's order or
# in the reverse one), or within elastic.run.
BEGINNINGS = ("same", "comm", "reversed", "elastic")
_ROUNDS = (1, 1, 1, 1, 2, 2, 3, 24)


@dataclass(frozen=True)
class Operation:
    """One step of all ranks, which leaves nothing behind."""

    kind: str
    seed: int


@dataclass(frozen=True)
class World:
    """Operations from a group's and RPC's beginning to their end.

    Attributes:
        rounds: Each has every kind once, in an order of its own.
    """

    number: int
    beginning: str
    rounds: tuple[tuple[Operation, ...], ...]


def world(seed: int, number: int, kinds: tuple[str, ...] = KINDS) -> World:
    """Return a world of the soak of a seed; the first ones begin in each of the ways."""
    rng = random.Random(f"soak {seed} {number}")
    is_first = number < len(BEGINNINGS)
    beginning = BEGINNINGS[number] if is_first else rng.choice(BEGINNINGS)
    rounds = tuple(
        tuple(Operation(kind, rng.randrange(100_000)) for kind in rng.sample(kinds, len(kinds)))
        for _ in range(1 if is_first else rng.choice(_ROUNDS))
    )
    return World(number, beginning, rounds)


def described(one: World) -> str:
    """Return a world in words."""
    done = [f"{each.kind} {each.seed}" for each in sum(one.rounds, ())]
    return f"world {one.number} ({one.beginning}): {', '.join(done)}"
