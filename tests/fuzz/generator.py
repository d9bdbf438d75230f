"""Generator of random programs: groups, and steps on the open groups."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.fuzz.drawn_calls import CallDraw
from tests.fuzz.programs import (
    COMPLEX,
    MOVES,
    MOVING,
    REDUCING,
    Close,
    Group,
    InOrder,
    Lanes,
    Make,
    Message,
    Messages,
    ObjectMessages,
    Program,
    Step,
    Then,
)
from tests.tools.simulated_nodes import SEVERAL

_NODES = ("one node", "one node", "one node", *SEVERAL, "alone", "alone")


def program(seed: int, size: int, without: Sequence[str] = ()) -> Program:
    """Return the program of a seed for ``size`` ranks, without the named features."""
    return _Generator(seed, size, frozenset(without)).program()


class _Generator:
    def __init__(self, seed: int, size: int, without: frozenset[str]) -> None:
        self.seed, self.size, self.without = seed, size, without
        self.rng = random.Random(f"program {seed}")
        self.groups: list[Group] = []
        self.open: list[int] = []
        self.steps: list[Step] = []
        self.draw = CallDraw(self.rng, without, self.groups)
        self._own_tags = itertools.count(100)

    def program(self) -> Program:
        world = tuple(range(self.size))
        self.groups.append(Group("world", None, world, is_debug=self.draw.has("debug", 0.25)))
        self.steps.append(Make(0))
        self.open.append(0)
        if self.draw.has("torch", 0.5):
            # torch sorts the members.
            members = world if self.rng.random() < 0.6 else tuple(sorted(self.some_of(world)))
            self.groups.append(Group("torch", None, members, is_torch=True))
            self.steps.append(Make(1))
            self.open.append(1)
        for _ in range(self.rng.randint(3, 10)):
            self.add_step()
        # Of its own source: the rest of a program is the same without this feature.
        nodes = random.Random(f"nodes {self.seed}").choice(_NODES)
        if "nodes" in self.without:
            nodes = "one node"
        return Program(self.seed, self.size, tuple(self.groups), tuple(self.steps), nodes)

    def add_step(self) -> None:
        drawn = self.rng.random()
        if drawn < 0.08:
            if "sub_groups" not in self.without:
                self.make_group()
        elif drawn < 0.11:
            if len(self.open) > 2:
                last = self.open.pop(self.rng.randrange(2, len(self.open)))
                self.steps.append(Close(last))
        elif drawn < 0.17:
            if "threads" not in self.without:
                self.add_lanes()
        elif drawn < 0.23:
            if "callbacks" not in self.without:
                self.add_then()
        elif drawn < 0.28:
            if "in_order" not in self.without:
                group = self.any_group()
                calls = tuple(self.draw.call(group) for _ in range(self.rng.randint(1, 3)))
                self.steps.append(InOrder(calls, self.draw.flags(self.draw.size_of(group))))
        elif drawn < 0.40:
            if "messages" not in self.without:
                self.add_messages()
        elif drawn < 0.44:
            if "objects" not in self.without:
                self.add_object_messages()
        else:
            self.steps.append(self.draw.call(self.any_group()))

    def some_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        chosen = self.rng.sample(list(ranks), self.rng.randint(1, len(ranks)))
        return tuple(chosen if self.rng.random() < 0.5 else sorted(chosen))

    def any_group(self) -> int:
        return self.rng.choice(self.open)

    def make_group(self) -> int:
        parent = self.any_group()
        how = self.rng.choice(("new_group", "split", "clone"))
        above = self.groups[parent]
        members = above.members if how == "clone" else self.some_of(above.members)
        if how == "split":
            members = tuple(sorted(members, key=above.members.index))
        number = len(self.groups)
        self.groups.append(Group(how, parent, members, is_debug=above.is_debug))
        self.steps.append(Make(number))
        self.open.append(number)
        return number

    def add_lanes(self) -> None:
        lanes = []
        for _ in range(self.rng.randint(2, 3)):
            if self.rng.random() < 0.7 or len(self.open) < 2:
                group = self.make_group()
            else:
                group = self.any_group()
            if any(group == lane[0].group for lane in lanes):
                continue
            lanes.append(tuple(self.draw.call(group) for _ in range(self.rng.randint(1, 4))))
        self.steps.append(Lanes(tuple(lanes)))

    def add_then(self) -> None:
        group = self.any_group()
        kinds = [*REDUCING, *MOVING]
        first, second = (replace(self.draw.call(group, kinds), repeats=1) for _ in range(2))
        if first.may_refuse or first.must_refuse or second.may_refuse or second.must_refuse:
            return
        api = (
            self.rng.choice(("native", "torch", "done"))
            if self.groups[group].is_torch
            else self.rng.choice(("native", "done"))
        )
        size = self.draw.size_of(group)
        first = replace(
            first, is_async=(True,) * size, apis=("torch" if api == "torch" else "native",) * size
        )
        if first.dtype in COMPLEX and first.op == "product":
            first = replace(first, op="sum")
        self.steps.append(Then(first, second, api))

    def add_messages(self) -> None:
        rng, group = self.rng, self.any_group()
        size = self.draw.size_of(group)
        way = rng.choice(("single", "batch", "blocking"))
        messages = []
        for _ in range(1 if way == "blocking" else rng.randint(1, 5)):
            src, dst = rng.randrange(size), rng.randrange(size)
            if src == dst and (way == "blocking" or self.groups[group].is_torch):
                # torch rejects messages to the own rank.
                continue
            dtype = rng.choice(MOVES)
            count = self.draw.count(getattr(torch, dtype).itemsize)
            # A receive from any source needs its own tag, or else it may match another message: one
            # of this step, or of a sender that is a step ahead.
            any_source = rng.random() < 0.2
            tag = next(self._own_tags) if any_source else rng.randrange(3)
            expected = None
            if count > 1 and self.draw.has("truncation", 0.04):
                expected, tag = rng.randrange(count), next(self._own_tags)
            messages.append(Message(src, dst, tag, count, dtype, any_source, expected))
        if messages:
            apis = self.draw.apis(group, uniform=False)
            self.steps.append(
                Messages(
                    group,
                    tuple(messages),
                    way,
                    apis,
                    self.draw.waits(size),
                    rng.randrange(1 << 30),
                    self.draw.modes(size),
                )
            )

    def add_object_messages(self) -> None:
        rng, group = self.rng, self.any_group()
        size = self.draw.size_of(group)
        if size < 2:
            return
        messages = []
        threads = rng.randint(1, 3) if "shared_objects" not in self.without else 1
        for _ in range(rng.randint(1, 6)):
            src, dst = rng.sample(range(size), 2)
            messages.append(
                (src, rng.randrange(threads), dst, rng.choice((0, 3, 1000, 9000, 20000)))
            )
        self.steps.append(
            ObjectMessages(group, tuple(messages), rng.random() < 0.5, rng.randrange(1 << 30))
        )
