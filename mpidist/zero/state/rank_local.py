"""Rank-local state dict: one rank's flat tensors, for the same world size and layout.

It holds only plain Python values and tensors, so ``torch.load`` reads it with
``weights_only=True``. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeGuard

import torch

from mpidist.zero.shards.buffer_plan import BufferPlan, Slot
from mpidist.zero.shards.groups import ParamGroup
from mpidist.zero.shards.shards import Shards
from mpidist.zero.state.shard_state import InFlat, KindKey, ShardState

Tensor = torch.Tensor
FORMAT = "mpidist.zero rank-local 1"
_CPU = torch.device("cpu")
# Place of an entry's value: in a flat tensor, among the loose tensors of a state of an earlier
# version, or in the entry itself.
FLAT, LOOSE, VALUE = "flat", "loose", "value"
# A value by name: the kind of its place, and the place or the value itself.
Entry: TypeAlias = tuple[str, str, Any]


class Layout(TypedDict):
    """Layout of all ranks' shards."""

    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    plans: list[tuple[str, list[tuple[int, int, int]], list[int]]]  # dtype, slots, bounds
    masters: bool


class RankLocalState(TypedDict):
    """One rank's state dict; ``ShardState`` explains the fields of the same name."""

    format: str
    rank: int
    world_size: int
    layout: Layout
    kinds: list[KindKey]
    flats: list[Tensor]
    loose: list[Tensor]  # tensors of entries; only earlier versions have put some here
    masters: list[Tensor]
    entries: dict[int, list[Entry]]
    parked: dict[int, int]  # deferred
    param_groups: list[ParamGroup]


def is_rank_local(given: object) -> TypeGuard[RankLocalState]:
    """Return whether a state dict is rank-local."""
    return isinstance(given, Mapping) and given.get("format") == FORMAT


def packed(state: ShardState, world_size: int) -> RankLocalState:
    """Return the state dict of a rank; its tensors are the state's."""
    entries: dict[int, list[Entry]] = {
        number: [
            (name, FLAT, value.kind) if isinstance(value, InFlat) else (name, VALUE, value)
            for name, value in held.items()
        ]
        for number, held in state.entries.items()
    }
    return {
        "format": FORMAT,
        "rank": state.rank,
        "world_size": world_size,
        "layout": layout(state.plans, state.forms, bool(state.masters)),
        "kinds": list(state.kinds),
        "flats": list(state.flats),
        "loose": [],
        "masters": list(state.masters),
        "entries": entries,
        "parked": dict(state.deferred),
        "param_groups": list(state.groups),
    }


def layout(plans: Sequence[BufferPlan], forms: Sequence[Tensor], has_masters: bool) -> Layout:
    """Return the layout, as plain values; a rank-local state dict fits one equal layout."""
    return {
        "shapes": [tuple(form.shape) for form in forms],
        "strides": [tuple(form.stride()) for form in forms],
        "plans": [
            (
                str(plan.dtype),
                [(slot.number, slot.offset, slot.numel) for slot in plan.slots],
                list(plan.bounds),
            )
            for plan in plans
        ],
        "masters": has_masters,
    }


def require_fits(given: RankLocalState, shards: Shards) -> None:
    """Refuse a state dict of another rank, world size or layout.

    Raises:
        ValueError: What does not fit.
    """
    rank, world_size, masters = shards.group.rank, shards.group.size, shards.masters.flats
    if given["world_size"] != world_size or given["rank"] != rank:
        raise ValueError(
            f"the rank-local state dict is of rank {given['rank']} of {given['world_size']}, and "
            f"this is rank {rank} of {world_size}: load a consolidated or a sharded one on "
            "another world size"
        )
    saved: Mapping[str, object] = given["layout"]
    own: Mapping[str, object] = layout(shards.plans, shards.parameters, bool(masters))
    for name, words in (
        ("shapes", "of another model: its parameters have other shapes"),
        ("strides", "of another layout: its parameters have other strides"),
        ("plans", "of another layout: partition, dtypes or frozen parameters differ"),
        ("masters", "of another layout: only one of the two has master copies (wire=)"),
    ):
        if saved[name] != own[name]:
            raise ValueError(
                f"the rank-local state dict is {words}; load a consolidated or a sharded one"
            )
    shard_sizes = shards.sizes()
    sizes = [shard_sizes[buffer] for buffer, _, _ in given["kinds"]]
    if [flat.numel() for flat in given["flats"]] != sizes:
        raise ValueError(
            "the rank-local state dict is damaged: its flat tensors have other lengths than its "
            "layout"
        )
    forms = [(held.shape, held.dtype) for held in masters]
    if [(flat.shape, flat.dtype) for flat in given["masters"]] != forms:
        raise ValueError(
            "the rank-local state dict is damaged: its master copies do not fit its layout"
        )


def state_of(given: RankLocalState) -> ShardState:
    """Return the state, with masters as entries; its tensors are the state dict's."""
    flat = [InFlat(kind) for kind in range(len(given["kinds"]))]
    loose, saved = given["loose"], given["layout"]
    return ShardState(
        rank=given["rank"],
        groups=given["param_groups"],
        kinds=tuple(given["kinds"]),
        flats=tuple(given["flats"]),
        entries={
            number: {
                name: flat[value] if where == FLAT else loose[value] if where == LOOSE else value
                for name, where, value in rows
            }
            for number, rows in given["entries"].items()
        },
        masters=tuple(given["masters"]),
        deferred=given["parked"],
        plans=tuple(
            BufferPlan(_dtype(dtype), _CPU, tuple(Slot(*slot) for slot in slots), tuple(bounds))
            for dtype, slots, bounds in saved["plans"]
        ),
        forms=tuple(
            torch.empty_strided(shape, strides, device="meta")
            for shape, strides in zip(saved["shapes"], saved["strides"], strict=True)
        ),
    ).with_masters()


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the rank-local state dict is damaged: no dtype is named {text}")
    return found
