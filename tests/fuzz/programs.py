"""Random collective programs as plain data. Pure: a seed and a size give one program on all ranks.

A program is a list of steps on groups that the program creates and closes. Where ranks may differ
without a change of meaning (asynchronous or not, native or torch's API, autograd mode, time of the
wait, memory layout of a tensor), a step has one choice per rank.

Letters: W ranks of a group; N elements of one contribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

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
    "nodes",  # ranks that count as being on several nodes
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
    """Steps on groups.

    Attributes:
        nodes: Layout of the ranks (``simulated_nodes``), as the groups see it.
    """

    seed: int
    size: int
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    nodes: str = "one node"


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


def described(step: Any) -> str:
    """Return a step as a Python expression, without default values."""
    if isinstance(step, tuple):
        return (
            f"({', '.join(map(described, step))},)"
            if step and hasattr(step[0], "__dataclass_fields__")
            else repr(step)
        )
    if not hasattr(step, "__dataclass_fields__"):
        return repr(step)
    parts = [
        f"{field.name}={described(getattr(step, field.name))}"
        for field in fields(step)
        if getattr(step, field.name) != field.default
    ]
    return f"{type(step).__name__}({', '.join(parts)})"
