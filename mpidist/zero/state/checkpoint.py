"""State for torch.distributed.checkpoint: each rank writes and reads the state that it owns.

Names, shapes and nesting are those of
``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``. State that a rank owns in part
is a ``PartOfTensor``: a tensor of the parameter's shape that gives the planner the chunks of its
elements.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mpidist.zero.shards.groups import Groups, ParamGroup, settings
from mpidist.zero.shards.pieces import Piece
from mpidist.zero.shards.shards import Shards
from mpidist.zero.state.chunks import chunks_of, view_of
from mpidist.zero.state.flat_state import ParamState
from mpidist.zero.state.shard_state import MASTER_KIND, InFlat, ShardState
from mpidist.zero.state.state_dict import MASTER, MASTERS, assembled

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

Tensor = torch.Tensor


class PartOfTensor(torch.Tensor):
    """This rank's elements of a tensor, with the whole tensor's shape.

    Args:
        form: Tensor of the whole's shape and strides.
        elements: This rank's elements, a vector in the order of memory.
        start: Number of the first one.
        is_known: The elements hold values; else they are to be read.

    Attributes:
        elements: As given; a load writes into them.
        is_known: The elements hold values.

    Source: the protocol ``torch.distributed._checkpointable._Checkpointable``.
    """

    elements: Tensor
    is_known: bool
    _offsets: list[tuple[int, ...]]
    _views: list[Tensor]

    @staticmethod
    def __new__(
        cls, form: Tensor, elements: Tensor, start: int, is_known: bool = True
    ) -> PartOfTensor:
        """Construct the tensor, without memory of its own."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, form.shape, dtype=elements.dtype, device=elements.device
        )
        made.elements = elements
        made.is_known = is_known
        found = chunks_of(form, start, start + elements.numel())
        made._offsets = [chunk.offsets for chunk in found]
        made._views = [view_of(chunk, form, elements, start) for chunk in found]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: object, types: object, args: Sequence[Any] = (), kwargs: object = None
    ) -> Tensor:
        # torch's stager makes a copy this way, and then sets the attributes.
        if function is torch.ops.aten.new_empty.default:
            whole = torch.empty(args[1], dtype=args[0].dtype, device="meta")
            return cls(whole, torch.empty(0, dtype=args[0].dtype, device=args[0].device), 0)
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of a part of a tensor: take its elements")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"PartOfTensor({self.elements.numel()} elements of shape {tuple(self.shape)}, "
            f"{self.dtype})"
        )

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        if not self.is_known:
            return []  # requested for a load; no value to write
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                None,
                TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), view.shape)
            for offsets, view in zip(self._offsets, self._views, strict=True)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is None:
            raise ValueError(f"{index.fqn} is held in parts: an offset is needed")
        self.is_known = True  # torch writes the values, or is about to read them
        return self._views[self._offsets.index(tuple(index.offset))]


def sharded(held: ShardState, optim: torch.optim.Optimizer, pieces: Sequence[Piece]) -> StateDict:
    """Return the state dict; its tensors are the state's.

    A trainable piece without state has that of a first step, which a checkpoint is to overwrite.

    Args:
        optim: The base optimizer.
        pieces: This rank's.
    """
    names = names_of(held.groups)
    own = {piece.number: piece for piece in pieces}
    state = {
        names[number]: {
            name: _packed(held, own.get(number), value) for name, value in values.items()
        }
        for number, values in held.entries.items()
    }
    group_of = [group for group in held.groups for _ in group["params"]]
    named_groups = [
        {**group, "params": [names[number] for number in group["params"]]} for group in held.groups
    ]
    result = assembled(state, named_groups)
    for piece in pieces:
        if names[piece.number] not in result["state"] and piece.parameter.requires_grad:
            form = held.forms[piece.number]
            first = state_of_first_step(optim, group_of[piece.number], piece).items()
            made: ParamState = {
                name: _wanted(piece, form, value)
                for name, value in first
                if isinstance(value, torch.Tensor)
            }
            if made:
                result["state"][names[piece.number]] = made
    return result


def names_of(groups: Groups) -> list[str]:
    """Return the parameters' names if each has one of its own (``param_names``), else numbers.

    Groups of two modules may name different parameters alike.
    """
    names = [name for group in groups for name in group.get("param_names") or ()]
    count = sum(len(group["params"]) for group in groups)
    return names if len(set(names)) == count else [str(number) for number in range(count)]


def shard_of(given: StateDict, groups: Groups, shards: Shards, present: ShardState) -> ShardState:
    """Return the state of a state dict, without state that was not loaded.

    Args:
        groups: Of all parameters.
        present: The state before the load.
    """
    names, state, masters = names_of(groups), given["state"], given.get(MASTERS, {})
    entries = {
        number: dict(state.get(names[number], present.entries[number]))
        for number in present.deferred
        if number in present.entries
    }
    for piece in shards.pieces:
        values = _known(state.get(names[piece.number]), piece)
        copies = _known(masters.get(names[piece.number]), piece) or {}
        if values is not None or copies:
            kept = {MASTER_KIND: copies[MASTER]} if MASTER in copies else {}
            entries[piece.number] = {**(values or {}), **kept}
    return replace(
        present,
        groups=given["param_groups"],
        kinds=(),
        flats=(),
        entries=entries,
        masters=(),
    )


def as_torch(given: StateDict, groups: Groups) -> StateDict:
    """Return the groups in a plain state dict without state, for the checks of plain state dicts.

    Raises:
        ValueError: The parameters have other names.
    """
    if not isinstance(given, Mapping) or "state" not in given or "param_groups" not in given:
        raise ValueError(
            "a sharded state dict is what sharded_state_dict() returned, filled by "
            "torch.distributed.checkpoint.load"
        )
    names = [name for group in given["param_groups"] for name in group["params"]]
    if names != names_of(groups):
        raise ValueError(
            f"the sharded state dict is of another model: it names {names[:4]}, this optimizer "
            f"{names_of(groups)[:4]}"
        )
    return {"state": {}, "param_groups": list(given["param_groups"])}


def _packed(held: ShardState, piece: Piece | None, value: object) -> object:
    if isinstance(value, InFlat):
        assert piece is not None and piece.home is not None
        _, at = piece.home
        return PartOfTensor(
            held.forms[piece.number],
            held.flats[value.kind][at : at + piece.stop - piece.start],
            piece.start,
        )
    return value


def _known(held: ParamState | None, piece: Piece) -> ParamState | None:
    """Return a piece's part of its state; None if it was not loaded."""
    # Torch reads no values of a tensor without elements.
    if not held or not all(
        value.is_known or not value.elements.numel()
        for value in held.values()
        if isinstance(value, PartOfTensor)
    ):
        return None
    return {name: _value(value, piece) for name, value in held.items()}


def _wanted(piece: Piece, form: Tensor, value: Tensor) -> PartOfTensor:
    elements = torch.zeros(value.numel(), dtype=value.dtype, device=value.device)
    if value.dim() and value.shape == piece.tensor.shape:
        return PartOfTensor(form, elements, piece.start, is_known=False)
    return PartOfTensor(torch.empty_like(value, device="meta"), elements, 0, is_known=False)


def _value(value: object, piece: Piece) -> object:
    if isinstance(value, PartOfTensor):
        if value.dim() and value.shape == piece.parameter.shape:
            return value.elements.as_strided(
                piece.tensor.shape, piece.tensor.stride(), value.elements.storage_offset()
            )
        return value.elements.view(value.shape)
    return value


def state_of_first_step(
    optim: torch.optim.Optimizer, group: ParamGroup, piece: Piece
) -> ParamState:
    """Return a piece's state after a step with a gradient of zeros, for names and shapes.

    Args:
        optim: The base optimizer, which does not change.
        group: The settings of the piece's group.
    """
    twin = torch.nn.Parameter(torch.zeros_like(piece.tensor.detach()))
    twin.grad = torch.zeros_like(twin)
    made = _like(optim, {**settings(group), "params": [twin]})
    made.step()
    return dict(made.state[twin])


def _like(optim: torch.optim.Optimizer, group: ParamGroup) -> torch.optim.Optimizer:
    """Return an optimizer of the same class over one group."""
    kind = type(optim)
    taken = inspect.signature(kind).parameters
    has_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    # AdamW and others keep settings among their defaults that their constructors do not take.
    arguments = {key: value for key, value in optim.defaults.items() if has_all or key in taken}
    try:
        return kind([group], **arguments)
    except TypeError:
        return _copied(optim, group)


def _copied(optim: torch.optim.Optimizer, group: ParamGroup) -> torch.optim.Optimizer:
    """Return a copy without state and hooks, for a constructor that takes other arguments."""
    made = object.__new__(type(optim))
    made.__dict__.update(optim.__dict__)
    held: dict[str, Any] = {
        name: OrderedDict() for name in vars(optim) if name.endswith(("pre_hooks", "post_hooks"))
    }
    made.__dict__.update(held, state=defaultdict(dict), param_groups=[group])
    return made
