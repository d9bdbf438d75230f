"""Random collective programs as plain data. Pure: a seed and a size give one program on all ranks.

A program is a list of steps on groups that the program creates and closes. Where ranks may differ
without a change of meaning (asynchronous or not, native or torch's API, autograd mode, time of the
wait, memory layout of a tensor), a step has one choice per rank.

Letters: W ranks of a group; N elements of one contribution.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

FEATURES = (
    "overlap",  # input and output share memory in a layout that MPI does not define
    "inference",  # torch.inference_mode() around tensors and calls
    # Leaves that require a gradient, as inputs, and under no_grad() as outputs.
    "requires_grad",
    "odd_strides",  # a stride other than 1 along a dimension of one element
    "premul",  # PremulSum
    # PremulSum of fp8, of integers by fractions, and of narrow dtypes by inexact factors.
    "premul_odd",
    "shared_objects",  # several threads of a rank send objects on one group
    "truncation",  # messages longer than the receive
    "uneven_reduce_scatter",
    "sub_groups",
    "threads",
    "callbacks",
    "in_order",
    "messages",
    "objects",
    "torch",  # torch.distributed on mpidist's backend
    "debug",  # groups in debug mode
    "large",  # 128 KiB and more
)

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = (*UNSIGNED, "int8", "int16", "int32", "int64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128", "complex32")
ADDS = (*FLOATS, *INTEGERS, *COMPLEX, *FLOAT8, "bool")
MOVES = (*ADDS, "float8_e8m0fnu")
SPECIALS = ("float64", "float32", "float16", "bfloat16", "float8_e5m2")  # with infinities and NaN

REDUCING = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
MOVING = (
    "broadcast", "broadcast_coalesced", "all_gather", "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced", "gather", "scatter", "all_to_all", "all_to_all_single",
)  # fmt: skip
OBJECTS = (
    "broadcast_object",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object",
)
ROOTED = (
    "reduce", "broadcast", "broadcast_coalesced", "gather", "scatter", "broadcast_object",
    "gather_object", "scatter_object", "broadcast_object_list",
)  # fmt: skip
PAIRS = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)

# Overlaps of input and output. MPI and torch define a layout for the first kind, whose result must
# be right; calls with other kinds may raise.
_CONTRIBUTING = (
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "gather", "scatter",
    "reduce_scatter",
)  # fmt: skip
IN_PLACE = dict.fromkeys(_CONTRIBUTING, "own")
OVERLAPS = {
    "all_to_all": ("same",),
    "all_to_all_single": ("same", "shifted"),
    "reduce_scatter_tensor": ("first", "last"),
    "all_gather_into_tensor": ("first", "last"),
    "all_gather": ("first",),
    "reduce_scatter": ("first",),
    "scatter": ("first",),
    "gather": ("first",),
}


@dataclass(frozen=True)
class Group:
    """Group of a program; number 0 is the group of all ranks.

    Attributes:
        how: "world", "torch" (all ranks call torch's new_group), "new_group", "split" or "clone".
        parent: Number of the group from which it is created; None for "world" and "torch".
        members: World ranks in group order.
        is_torch: Has a torch group in addition to the native one.
    """

    how: str
    parent: int | None
    members: tuple[int, ...]
    is_torch: bool = False
    is_debug: bool = False


@dataclass(frozen=True)
class Make:
    """Creation of group ``group`` by all ranks of its parent."""

    group: int


@dataclass(frozen=True)
class Close:
    """Closing of group ``group``, possibly with asynchronous operations in progress."""

    group: int


@dataclass(frozen=True)
class Call:
    """One collective of tensors or objects.

    Attributes:
        counts: Elements of each tensor of a list, of each rank's contribution, or of each (sender,
            receiver) pair.
        factors: Factors of PremulSum by rank; empty for ``op``.
        values: "whole" (small whole numbers), "normal", "special" (NaN, infinities), "wide" (all
            bits of integers), "bits".
        overlap: Kind of memory shared by input and output.
        row: Elements of a row of ``all_to_all_single``.
        repeats: Number of executions on the same memory.
        may_refuse: An error on all ranks is also right.
        must_refuse: The call has no meaning, and raises TypeError or ValueError on all ranks.
        apis: By rank, "native" or "torch".
        modes: By rank, "", "no_grad" or "inference".
        requires_grad: Some tensors are leaves that require a gradient.
        waits: By rank, number of further steps before the wait for an asynchronous call.
    """

    kind: str
    group: int
    apis: tuple[str, ...]
    is_async: tuple[bool, ...]
    modes: tuple[str, ...]
    waits: tuple[int, ...]
    seed: int
    dtype: str = "float32"
    op: str = "sum"
    factors: tuple[float, ...] = ()
    root: int = 0
    counts: tuple[int, ...] = ()
    row: int = 1
    values: str = "whole"
    overlap: str = ""
    repeats: int = 1
    may_refuse: bool = False
    must_refuse: bool = False
    requires_grad: bool = False
    odd_strides: bool = True


@dataclass(frozen=True)
class Lanes:
    """Threads of each rank, each with calls on its own group."""

    lanes: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True)
class Then:
    """Future callback that issues a second collective.

    ``api``: "native" then(), "torch" then(), or "done" callback.
    """

    first: Call
    second: Call
    api: str


@dataclass(frozen=True)
class InOrder:
    """Several calls as one operation of their group."""

    calls: tuple[Call, ...]
    is_async: tuple[bool, ...]


@dataclass(frozen=True)
class Message:
    """Tensor from one rank of a group to another."""

    src: int
    dst: int
    tag: int
    count: int
    dtype: str
    any_source: bool = False
    # Elements of the receive, if fewer than the message has.
    expected: int | None = None


@dataclass(frozen=True)
class Messages:
    """Point-to-point messages in progress at the same time.

    ``way``: "single", "batch", or "blocking" (one message).
    """

    group: int
    messages: tuple[Message, ...]
    way: str
    apis: tuple[str, ...]
    waits: tuple[int, ...]
    seed: int
    modes: tuple[str, ...]


@dataclass(frozen=True)
class ObjectMessages:
    """Objects between threads of a group's ranks: (source, thread, destination, elements)."""

    group: int
    messages: tuple[tuple[int, int, int, int], ...]
    any_source: bool
    seed: int


Step = Make | Close | Call | Lanes | Then | InOrder | Messages | ObjectMessages


@dataclass(frozen=True)
class Program:
    """Steps on groups."""

    seed: int
    size: int
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]


def program(seed: int, size: int, without: Sequence[str] = ()) -> Program:
    """Return the program of a seed for ``size`` ranks, without the named features."""
    return _Maker(seed, size, frozenset(without)).program()


def groups_of(step: Step) -> set[int]:
    """Return the numbers of a step's groups."""
    if isinstance(step, Lanes):
        return {call.group for lane in step.lanes for call in lane}
    if isinstance(step, InOrder):
        return {call.group for call in step.calls}
    if isinstance(step, Then):
        return {step.first.group}
    return {step.group}


def kept(whole: Program, places: Sequence[int]) -> Program:
    """Return the program with only these steps and the creation and closing of their groups."""
    wanted = {place for place in places if not isinstance(whole.steps[place], (Make, Close))}
    needed = {group for place in wanted for group in groups_of(whole.steps[place])}
    needed |= {
        group
        for place in places
        if isinstance(step := whole.steps[place], Make)
        for group in (step.group,)
    }
    for group in sorted(needed, reverse=True):  # parents have lower numbers
        while (parent := whole.groups[group].parent) is not None:
            needed.add(parent)
            group = parent
    steps = [
        step
        for place, step in enumerate(whole.steps)
        if place in wanted or (isinstance(step, (Make, Close)) and step.group in needed)
    ]
    return replace(whole, steps=tuple(steps))


class _Maker:
    def __init__(self, seed: int, size: int, without: frozenset[str]) -> None:
        self.seed, self.size, self.without = seed, size, without
        self.rng = random.Random(f"program {seed}")
        self.groups: list[Group] = []
        self.open: list[int] = []
        self.steps: list[Step] = []

    def has(self, feature: str, chance: float) -> bool:
        # Draw in any case, so that the rest of a program stays the same without a feature if
        # possible.
        return self.rng.random() < chance and feature not in self.without

    def program(self) -> Program:
        world = tuple(range(self.size))
        self.groups.append(Group("world", None, world, is_debug=self.has("debug", 0.25)))
        self.steps.append(Make(0))
        self.open.append(0)
        if self.has("torch", 0.5):
            # torch sorts the members.
            members = world if self.rng.random() < 0.6 else tuple(sorted(self.some_of(world)))
            self.groups.append(Group("torch", None, members, is_torch=True))
            self.steps.append(Make(1))
            self.open.append(1)
        for _ in range(self.rng.randint(3, 10)):
            self.add_step()
        return Program(self.seed, self.size, tuple(self.groups), tuple(self.steps))

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
                calls = tuple(self.call(group) for _ in range(self.rng.randint(1, 3)))
                self.steps.append(InOrder(calls, self.flags(self.size_of(group))))
        elif drawn < 0.40:
            if "messages" not in self.without:
                self.add_messages()
        elif drawn < 0.44:
            if "objects" not in self.without:
                self.add_object_messages()
        else:
            self.steps.append(self.call(self.any_group()))

    # --- groups ---

    def some_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        chosen = self.rng.sample(list(ranks), self.rng.randint(1, len(ranks)))
        return tuple(chosen if self.rng.random() < 0.5 else sorted(chosen))

    def any_group(self) -> int:
        return self.rng.choice(self.open)

    def size_of(self, group: int) -> int:
        return len(self.groups[group].members)

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

    # --- steps ---

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

    def add_lanes(self) -> None:
        lanes = []
        for _ in range(self.rng.randint(2, 3)):
            if self.rng.random() < 0.7 or len(self.open) < 2:
                group = self.make_group()
            else:
                group = self.any_group()
            if any(group == lane[0].group for lane in lanes):
                continue
            lanes.append(tuple(self.call(group) for _ in range(self.rng.randint(1, 4))))
        self.steps.append(Lanes(tuple(lanes)))

    def add_then(self) -> None:
        group = self.any_group()
        kinds = [*REDUCING, *MOVING]
        first, second = (replace(self.call(group, kinds), repeats=1) for _ in range(2))
        if first.may_refuse or first.must_refuse or second.may_refuse or second.must_refuse:
            return
        api = (
            self.rng.choice(("native", "torch", "done"))
            if self.groups[group].is_torch
            else self.rng.choice(("native", "done"))
        )
        size = self.size_of(group)
        first = replace(
            first, is_async=(True,) * size, apis=("torch" if api == "torch" else "native",) * size
        )
        if first.dtype in COMPLEX and first.op == "product":
            first = replace(first, op="sum")
        self.steps.append(Then(first, second, api))

    def add_messages(self) -> None:
        rng, group = self.rng, self.any_group()
        size = self.size_of(group)
        way = rng.choice(("single", "batch", "blocking"))
        messages = []
        for place in range(1 if way == "blocking" else rng.randint(1, 5)):
            src, dst = rng.randrange(size), rng.randrange(size)
            if src == dst and (way == "blocking" or self.groups[group].is_torch):
                # torch rejects messages to the own rank.
                continue
            dtype = rng.choice(MOVES)
            count = self.count(getattr(torch, dtype).itemsize)
            # A receive from any source needs its own tag, or else it may match another message.
            any_source = rng.random() < 0.2
            tag = 100 + place if any_source else rng.randrange(3)
            expected = None
            if count > 1 and self.has("truncation", 0.04):
                expected, tag = rng.randrange(count), 200 + place
            messages.append(Message(src, dst, tag, count, dtype, any_source, expected))
        if messages:
            apis = self.apis(group, uniform=False)
            self.steps.append(
                Messages(
                    group,
                    tuple(messages),
                    way,
                    apis,
                    self.waits(size),
                    rng.randrange(1 << 30),
                    self.modes(size),
                )
            )

    def add_object_messages(self) -> None:
        rng, group = self.rng, self.any_group()
        size = self.size_of(group)
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
