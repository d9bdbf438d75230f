"""Pieces: the tensors that the base optimizer steps on one rank.

A parameter that a rank owns whole is its own piece, with its own gradient. For a cut parameter, or
one with a master copy, the piece is a vector of the owned elements; its gradient is a view of the
same part of the parameter's gradient, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mpidist.kernels.view import is_dense
from mpidist.zero.shards.buffer_plan import BufferPlan
from mpidist.zero.shards.flat_buffers import in_memory_order

Tensor = torch.Tensor


@dataclass(eq=False)
class Piece:
    """Elements ``start`` to ``stop`` of one parameter, in the order of their memory.

    Attributes:
        number: The parameter's number.
        parameter: The parameter.
        tensor: The base optimizer's tensor: the parameter, or a vector or matrix of its elements.
        home: Index of its flat buffer, and its first element in the rank's shard of that buffer;
            None without a buffer.
    """

    number: int
    parameter: Tensor
    start: int
    stop: int
    tensor: Tensor
    home: tuple[int, int] | None = None

    @property
    def is_parameter(self) -> bool:
        """Return whether the base optimizer holds the parameter itself."""
        return self.tensor is self.parameter

    @property
    def is_whole(self) -> bool:
        """Return whether the piece is all of the parameter."""
        return self.stop - self.start == self.parameter.numel()

    def gradient(self) -> Tensor | None:
        """Return the gradient of these elements, a view of the parameter's where its layout allows.

        Raises:
            RuntimeError: The gradient is sparse, and the parameter is cut or has a master copy.
        """
        return None if self.parameter.grad is None else self.part_of(self.parameter.grad)

    def part_of(self, gradient: Tensor) -> Tensor:
        """Return these elements of a gradient of the parameter, a view where its layout allows.

        Raises:
            RuntimeError: The gradient is sparse, and the parameter is cut or has a master copy.
        """
        if self.is_parameter:
            return gradient
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {self.number} has a gradient of layout {gradient.layout}, which cannot "
                "be cut: take partition='greedy' or 'balanced' without wire="
            )
        if self.is_whole and self.tensor.shape == gradient.shape:
            return gradient
        return in_memory_order(gradient, self.parameter)[self.start : self.stop]

    def state_view(self, flat: Tensor) -> Tensor:
        """Return these elements of a flat tensor of the shard, in the piece's shape and strides."""
        assert self.home is not None
        _, at = self.home
        part = flat[at : at + self.stop - self.start]
        return part.as_strided(self.tensor.shape, self.tensor.stride(), part.storage_offset())

    def put_back(self, values: Tensor) -> None:
        """Write changed values of ``gradient()`` back, unless they are views of the gradient."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self.is_parameter or values.layout is not torch.strided:
            return
        if values.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr():
            return
        whole = in_memory_order(gradient, self.parameter)  # a copy: else values would be a view
        whole[self.start : self.stop].copy_(values.reshape(-1))
        if is_dense(self.parameter):
            whole = whole.as_strided(self.parameter.shape, self.parameter.stride())
        gradient.copy_(whole.view(gradient.shape))


def unchanged(pieces: Iterable[Piece], plans: Sequence[BufferPlan]) -> list[Piece]:
    """Return the pieces whose parameters have the dtype and device of their buffers."""
    kinds = [(plan.dtype, plan.device) for plan in plans]
    return [
        piece
        for piece in pieces
        if piece.home is not None
        and kinds[piece.home[0]] == (piece.parameter.dtype, piece.parameter.device)
    ]


class Gradients:
    """Gradients of the base optimizer's tensors during a step.

    Args:
        pieces: Pieces that are not parameters; they get views of the parameters' gradients.
        outside: Pieces of frozen parameters, which may have a gradient but are not stepped.
    """

    def __init__(self, pieces: Sequence[Piece], outside: Iterable[Piece]) -> None:
        self._pieces = pieces
        self._outside = list(outside)
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def attach(self) -> None:
        """Set the pieces' gradients to their parameters', and hide those of frozen parameters."""
        for piece in self._pieces:
            piece.tensor.grad = piece.gradient()
        for piece in self._outside:
            if not piece.is_parameter:
                piece.tensor.grad = None
            elif piece.parameter.grad is not None:
                self._hidden.append((piece.parameter, piece.parameter.grad))
                piece.parameter.grad = None

    def detach(self) -> None:
        """Undo ``attach``; pieces must not keep gradients that their parameters have freed."""
        for piece in self._pieces:
            piece.tensor.grad = None
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
