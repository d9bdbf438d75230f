"""Rank-local state dict: one rank's flat tensors, for the same world size and layout.

It holds only plain Python values and tensors, so ``torch.load`` reads it with
``weights_only=True``. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeGuard

import torch

from mpidist.zero.groups import Groups, ParamGroup
from mpidist.zero.pieces import Piece
from mpidist.zero.shard_image import InFlat, KindKey, Loose, ShardImage
from mpidist.zero.state_dict import MASTER, SEEN, ParamState, StateByNumber, for_base
from mpidist.zero.unowned_state import UnownedState

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

Tensor = torch.Tensor
FORMAT = "mpidist.zero rank-local 1"
# Place of an entry's value: in a flat tensor, among the loose tensors, or in the entry itself.
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
    """One rank's state dict; ``ShardImage`` explains the fields of the same name."""

    format: str
    rank: int
    world_size: int
    layout: Layout
    kinds: list[KindKey]
    flats: list[Tensor]
    loose: list[Tensor]
    masters: list[Tensor]
    seen: list[Tensor]  # states of earlier versions have none
    entries: dict[int, list[Entry]]
    parked: dict[int, int]  # the rank that keeps the state of each parameter without a piece
    param_groups: list[ParamGroup]


def is_rank_local(given: object) -> TypeGuard[RankLocalState]:
    """Return whether a state dict is rank-local."""
    return isinstance(given, Mapping) and given.get("format") == FORMAT


def packed(
    image: ShardImage, world_size: int, unowned: UnownedState, packed_groups: list[ParamGroup]
) -> RankLocalState:
    """Return the state dict of a rank; its tensors are the image's.

    Args:
        packed_groups: Of all parameters, with numbers for parameters.
    """
    return {
        "format": FORMAT,
        "rank": image.rank,
        "world_size": world_size,
        "layout": layout(image),
        "kinds": list(image.kinds),
        "flats": list(image.flats),
        "loose": list(image.loose),
        "masters": list(image.masters),
        "seen": list(image.seen),
        "entries": {
            number: [described(name, value) for name, value in held.items()]
            for number, held in image.entries.items()
        },
        "parked": dict(unowned.owners),
        "param_groups": packed_groups,
    }


def layout(image: ShardImage) -> Layout:
    """Return the layout, as plain values; a rank-local state dict fits one equal layout."""
    return {
        "shapes": [tuple(form.shape) for form in image.forms],
        "strides": [tuple(form.stride()) for form in image.forms],
        "plans": [
            (
                str(plan.dtype),
                [(slot.number, slot.offset, slot.numel) for slot in plan.slots],
                list(plan.bounds),
            )
            for plan in image.plans
        ],
        "masters": bool(image.masters),
    }


def require_fits(given: RankLocalState, image: ShardImage, world_size: int) -> None:
    """Refuse a state dict of another rank, world size or layout.

    Raises:
        ValueError: What does not fit.
    """
    if given["world_size"] != world_size or given["rank"] != image.rank:
        raise ValueError(
            f"the rank-local state dict is of rank {given['rank']} of {given['world_size']}, and "
            f"this is rank {image.rank} of {world_size}: load a consolidated or a sharded one on "
            "another world size"
        )
    saved: Mapping[str, object] = given["layout"]
    own: Mapping[str, object] = layout(image)
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
    sizes = [
        image.plans[place].bounds[image.rank + 1] - image.plans[place].bounds[image.rank]
        for place, _, _ in given["kinds"]
    ]
    if [flat.numel() for flat in given["flats"]] != sizes:
        raise ValueError(
            "the rank-local state dict is damaged: its flat tensors have other lengths than its "
            "layout"
        )
    forms = [(held.shape, held.dtype) for held in image.masters]
    for held in (given["masters"], given.get("seen") or image.masters):
        if [(flat.shape, flat.dtype) for flat in held] != forms:
            raise ValueError(
                "the rank-local state dict is damaged: its master copies do not fit its layout"
            )


def restored(given: RankLocalState, pieces: Sequence[Piece], base_groups: Groups) -> StateDict:
    """Return a state dict for the base optimizer: views of flat tensors, copies of loose ones."""

    def held_by(piece: Piece) -> ParamState | None:
        rows = given["entries"].get(piece.number)
        return None if rows is None else {name: _value(given, piece, *row) for name, *row in rows}

    return for_base(given["param_groups"], base_groups, pieces, held_by)


def masters_in(given: RankLocalState, pieces: Sequence[Piece]) -> StateByNumber:
    """Return views of a rank-local state dict's master copies, by parameter number."""
    return {
        piece.number: {
            name: piece.state_view(flats[piece.home[0]])
            for name, flats in ((MASTER, given["masters"]), (SEEN, given.get("seen", [])))
            if flats
        }
        for piece in pieces
        if piece.home is not None and given["masters"]
    }


def unowned_in(given: RankLocalState) -> UnownedState:
    """Return copies of a rank-local state dict's state without a piece."""
    entries = {
        number: given["entries"][number] for number in given["parked"] if number in given["entries"]
    }
    held = {
        number: {name: _value(given, None, *row) for name, *row in rows}
        for number, rows in entries.items()
    }
    return UnownedState(given["parked"], held)


def described(name: str, value: object) -> Entry:
    """Return an image's entry as plain data: name, kind of place, and place or value."""
    if isinstance(value, InFlat):
        return name, FLAT, value.kind
    if isinstance(value, Loose):
        return name, LOOSE, value.place
    return name, VALUE, value


def _value(given: RankLocalState, piece: Piece | None, where: str, value: Any) -> object:
    if where == FLAT:
        assert piece is not None
        return piece.state_view(given["flats"][value])
    if where == LOOSE:
        value = given["loose"][value]
    return value.clone() if isinstance(value, torch.Tensor) else value
