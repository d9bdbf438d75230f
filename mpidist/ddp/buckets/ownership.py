"""Owners of gradients, from bounds per parameter to ranges of a bucket: pure.

A sharded optimizer states its bounds as plain data: for each parameter the ranges of its elements,
in the order of memory, with the rank that steps them. A parameter without bounds is common: all
ranks get its average.

Letters: W ranks of the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mpidist.ddp.buckets.settings import require_int

Tensor = torch.Tensor
Bounds = tuple[tuple[int, int, int], ...]  # of one parameter: rank, start, stop
Range = tuple[int, int]  # start and stop, in elements

DEFAULT_BUFFERS = 2  # one is filled while another is under way


@dataclass(frozen=True)
class Ownership:
    """Owners to which a communication hook reduces; the hook's attribute ``ownership``.

    Attributes:
        bounds: For each parameter its owners.
        buffers: Number of buffers in which the buckets rotate.
    """

    bounds: Mapping[Tensor, Bounds]
    buffers: int = DEFAULT_BUFFERS


@dataclass(frozen=True)
class Split:
    """Ranges of a flat tensor by owner.

    Attributes:
        by_rank: For each rank its ranges, in ascending order.
        common: The ranges of all ranks.
    """

    by_rank: tuple[tuple[Range, ...], ...]
    common: tuple[Range, ...]


def ownership_of(hook: object) -> Ownership | None:
    """Return the owners to which a hook reduces; None if all ranks get the averages."""
    return getattr(hook, "ownership", None)


def split(numels: Sequence[int], bounds: Sequence[Bounds | None], size: int) -> Split:
    """Return the ranges of a flat tensor by owner.

    Args:
        numels: Elements of each parameter, in the order of the tensor.
        bounds: Bounds of each parameter; None for a common one.
        size: W.
    """
    by_rank: list[list[Range]] = [[] for _ in range(size)]
    common: list[Range] = []
    begin = 0
    for numel, owners in zip(numels, bounds, strict=True):
        if owners is None:
            _append(common, begin, begin + numel)
        else:
            for rank, start, stop in owners:
                _append(by_rank[rank], begin + start, begin + stop)
        begin += numel
    return Split(tuple(map(tuple, by_rank)), tuple(common))


def bounds_by_place(
    ownership: Ownership, parameters: Sequence[Tensor], names: Sequence[str], size: int
) -> dict[int, Bounds]:
    """Return the owners by the parameters' places.

    Args:
        size: W.

    Raises:
        TypeError: The bounds are no mapping of tensors to tuples of three ints, or the number of
            buffers is no int.
        ValueError: The bounds do not cover a parameter once, in ascending order; name a rank
            outside of the group, or a parameter of another module; or there is no buffer.
    """
    require_int("the number of buffers", ownership.buffers, least=1)
    if not isinstance(ownership.bounds, Mapping):
        raise TypeError(
            "bounds must be a mapping of parameters to their owners; got "
            f"{type(ownership.bounds).__name__}"
        )
    place_of = {parameter: place for place, parameter in enumerate(parameters)}
    found: dict[int, Bounds] = {}
    for key, owners in ownership.bounds.items():
        if not isinstance(key, Tensor):
            raise TypeError(
                "bounds must be a mapping of parameters to their owners; got a key of "
                f"{type(key).__name__}"
            )
        if key in place_of:
            found[place_of[key]] = require_cover(names[place_of[key]], owners, key.numel(), size)
        elif key.requires_grad:
            raise ValueError(
                f"bounds hold a parameter of shape {tuple(key.shape)} whose gradients this module "
                "does not reduce: of an optimizer of several modules, each needs the bounds of its "
                "own parameters"
            )
    return found


def require_cover(name: str, owners: Bounds, numel: int, size: int) -> Bounds:
    """Return one parameter's owners.

    Raises:
        TypeError: ``owners`` is no sequence of three ints each.
        ValueError: The ranges do not cover [0, ``numel``) once in ascending order, or a rank is not
            below ``size``.
    """
    try:
        ranges = tuple((int(rank), int(start), int(stop)) for rank, start, stop in owners)
    except (TypeError, ValueError):
        raise TypeError(
            f"the owners of parameter {name!r} must be tuples of (rank, start, stop); got "
            f"{owners!r}"
        ) from None
    end = 0
    for rank, start, stop in ranges:
        if not 0 <= rank < size:
            raise ValueError(
                f"parameter {name!r} has rank {rank} as an owner; the group has ranks 0 to "
                f"{size - 1}"
            )
        if start != end or stop < start:
            raise ValueError(
                f"the owners of parameter {name!r} leave a gap, or overlap, at element {end}: "
                f"{ranges}"
            )
        end = stop
    if end != numel:
        raise ValueError(f"the owners of parameter {name!r} cover {end} of its {numel} elements")
    return ranges


def _append(ranges: list[Range], start: int, stop: int) -> None:
    """Append a range, or extend the last one if the new one is adjacent."""
    if start == stop:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))
