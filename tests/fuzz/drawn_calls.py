"""Random calls of a program: kind, operands' sizes, reduction, and each rank's choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.fuzz.programs import (
    ADDS,
    COMPLEX,
    FLOAT8,
    FLOATS,
    IN_PLACE,
    INTEGERS,
    MOVES,
    MOVING,
    OBJECTS,
    OVERLAPS,
    REDUCING,
    ROOTED,
    SPECIALS,
    Call,
    Group,
)


class CallDraw:
    """Draws calls on the groups of one program.

    Args:
        rng: Source of all draws of the program.
        without: Features that no call has.
        groups: Groups of the program, which may grow.
    """

    def __init__(
        self, rng: random.Random, without: frozenset[str], groups: Sequence[Group]
    ) -> None:
        self.rng, self.without, self.groups = rng, without, groups

    def has(self, feature: str, chance: float) -> bool:
        # Draw in any case, so that the rest of a program stays the same without a feature if
        # possible.
        return self.rng.random() < chance and feature not in self.without

    def size_of(self, group: int) -> int:
        return len(self.groups[group].members)

    def flags(self, size: int) -> tuple[bool, ...]:
        chance = self.rng.choice((0.0, 0.5, 0.5, 1.0))
        return tuple(self.rng.random() < chance for _ in range(size))

    def apis(self, group: int, uniform: bool) -> tuple[str, ...]:
        size = self.size_of(group)
        if not self.groups[group].is_torch:
            return ("native",) * size
        one = self.rng.choice(("native", "torch", "torch"))
        return (
            (one,) * size
            if uniform
            else tuple(self.rng.choice((one, one, "native", "torch")) for _ in range(size))
        )

    def modes(self, size: int) -> tuple[str, ...]:
        weights = (6, 1, 0 if "inference" in self.without else 1.5)
        if self.rng.random() < 0.5:
            return tuple(self.rng.choices(("", "no_grad", "inference"), weights) * size)
        return tuple(self.rng.choices(("", "no_grad", "inference"), weights, k=size))

    def waits(self, size: int) -> tuple[int, ...]:
        return tuple(self.rng.choice((0, 0, 1, 2, 5, 99)) for _ in range(size))

    def call(self, group: int, kinds: Sequence[str] = ()) -> Call:
        rng, size = self.rng, self.size_of(group)
        if not kinds:
            objects = () if "objects" in self.without else OBJECTS
            kinds = rng.choice(
                (
                    REDUCING,
                    REDUCING,
                    REDUCING,
                    MOVING,
                    MOVING,
                    MOVING,
                    objects or MOVING,
                    ("barrier",),
                )
            )
        kind = rng.choice(list(kinds))
        dtype = rng.choice(ADDS if kind in REDUCING else MOVES)
        if rng.random() < 0.3:
            dtype = rng.choice(FLOATS)
        drawn = Call(
            kind=kind,
            group=group,
            apis=self.apis(group, uniform=kind in OBJECTS or dtype in COMPLEX),
            is_async=(False,) * size if kind in OBJECTS else self.flags(size),
            modes=self.modes(size),
            waits=self.waits(size),
            seed=rng.randrange(1 << 30),
            dtype=dtype,
            root=rng.randrange(size) if kind in ROOTED else 0,
            repeats=rng.choice((1, 1, 1, 1, 2, 3)),
            odd_strides="odd_strides" not in self.without,
            requires_grad=self.has("requires_grad", 0.06) and dtype in FLOATS,
        )
        if kind in REDUCING:
            drawn = self.reduction(drawn)
        elif kind in MOVING:
            drawn = replace(drawn, values=rng.choice(("whole", "bits")))
        drawn = replace(drawn, counts=self.counts(drawn), row=rng.choice((1, 1, 2, 3, 7)))
        if max(drawn.counts, default=0) > 1 << 17:
            drawn = replace(drawn, repeats=1)
        drawn = self.overlapping(drawn)
        if kind == "reduce_scatter" and self.has("uneven_reduce_scatter", 0.04) and size > 1:
            counts = tuple(rng.randrange(9) for _ in range(size))
            drawn = replace(drawn, counts=counts, overlap="", may_refuse=len(set(counts)) > 1)
        if drawn.may_refuse or drawn.must_refuse:
            drawn = replace(drawn, repeats=1)
        return drawn

    def reduction(self, drawn: Call) -> Call:
        rng, dtype = self.rng, drawn.dtype
        fractional = dtype in FLOATS or dtype in FLOAT8 or dtype in COMPLEX
        ops = ["sum", "sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
        bad = {"band", "bor", "bxor"} if fractional else {"avg"} if dtype == "bool" else set()
        if dtype in COMPLEX:
            bad |= {"min", "max"}
            if "torch" in drawn.apis:
                # torch's front end rejects complex products.
                bad.add("product")
        if rng.random() < 0.02 and bad:
            return replace(drawn, op=rng.choice(sorted(bad)), must_refuse=True)
        op = rng.choice([op for op in ops if op not in bad])
        values = "whole"
        if dtype in SPECIALS and op != "avg" and rng.random() < 0.2:
            values = "special"
        elif (
            fractional
            and op in ("sum", "avg", "min", "max")
            and dtype not in FLOAT8
            and rng.random() < 0.4
        ):
            values = "normal"
        elif (
            dtype in INTEGERS and op in ("min", "max", "band", "bor", "bxor") and rng.random() < 0.5
        ):
            values = "wide"
        factors: tuple[float, ...] = ()
        if op == "sum" and dtype not in COMPLEX and self.has("premul", 0.25):
            odd = dtype in FLOAT8
            choices: tuple[float, ...] = (
                (2, 3, 1) if dtype in INTEGERS or dtype == "bool" else (0.5, 2, -1.0)
            )
            if dtype in FLOATS and (
                "premul_odd" not in self.without or dtype in ("float32", "float64")
            ):
                choices = (*choices, 1 / 3)
            if dtype in INTEGERS and rng.random() < 0.2:
                choices, odd = (0.5, 1.5), True
            # torch converts every factor to float.
            if dtype in INTEGERS and "torch" in drawn.apis:
                drawn, odd = replace(drawn, apis=("torch",) * len(drawn.apis)), True
            factors = tuple(rng.choice(choices) for _ in drawn.apis)
            if 1 / 3 in factors:
                values = "normal"
            if dtype == "bool":
                return replace(drawn, factors=factors, must_refuse=True)
            if odd and "premul_odd" in self.without:
                factors = ()
            return replace(
                drawn,
                factors=factors,
                values=values if factors else "whole",
                may_refuse=odd and bool(factors),
            )
        return replace(drawn, op=op, values=values)

    def overlapping(self, drawn: Call) -> Call:
        if drawn.kind in IN_PLACE and self.rng.random() < 0.15:
            return replace(drawn, overlap=IN_PLACE[drawn.kind])
        if drawn.kind in OVERLAPS and self.has("overlap", 0.1):
            counts = drawn.counts
            if drawn.kind in ("all_to_all", "all_to_all_single", "all_gather"):  # parts of one size
                counts = (counts[0],) * len(counts)
            # Under a root only one rank's memory overlaps: if that rank raised, the others would
            # wait.
            may_refuse = drawn.kind not in ("gather", "scatter")
            return replace(
                drawn,
                counts=counts,
                overlap=self.rng.choice(OVERLAPS[drawn.kind]),
                may_refuse=may_refuse,
            )
        return drawn

    def counts(self, drawn: Call) -> tuple[int, ...]:
        rng, size = self.rng, self.size_of(drawn.group)
        itemsize = 8 if drawn.kind in OBJECTS else getattr(torch, drawn.dtype).itemsize
        if drawn.kind == "barrier":
            return ()
        if drawn.kind in OBJECTS:
            return tuple(self.count(itemsize) for _ in range(size))
        if "coalesced" in drawn.kind:
            return tuple(self.count(itemsize, large=0.3) for _ in range(rng.randint(1, 5)))
        if drawn.kind == "all_gather":
            one = self.count(itemsize)
            if rng.random() < 0.5:
                return (one,) * size
            return tuple(rng.choice((one, self.count(itemsize, large=0.3))) for _ in range(size))
        if drawn.kind in ("all_to_all", "all_to_all_single"):
            one = self.count(itemsize, large=0.5)
            if rng.random() < 0.5:
                return (one,) * size**2
            return tuple(rng.choice((one, 0, rng.randrange(30))) for _ in range(size**2))
        return (
            self.count(itemsize, is_largest=drawn.kind in ("all_reduce", "reduce", "broadcast")),
        )

    def count(self, itemsize: int, large: float = 1.0, is_largest: bool = False) -> int:
        drawn = self.rng.random()
        if drawn < 0.06:
            return 0
        if drawn < 0.22:
            return 1
        if drawn < 0.72:
            return self.rng.randrange(2, 65)
        if drawn < 0.86:
            return self.rng.randrange(65, 3000)
        # Near the sizes at which the library switches algorithms.
        limits = [4 << 10, 32 << 10, 64 << 10]
        if self.has("large", 0.3 * large):
            limits = [128 << 10, 256 << 10]
            if is_largest and self.rng.random() < 0.3:
                limits = [16 << 20] if self.rng.random() < 0.03 else [1 << 20, 2 << 20]
        return max(self.rng.choice(limits) // itemsize + self.rng.choice((-1, 0, 1, 7)), 1)
