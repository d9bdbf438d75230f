"""Checks of a call's arguments on this rank, before any call of MPI.

Every message names the place, the expected value and the given one. ``where`` is ``rank r of W
(group "name"): operation``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from mpidist.comm.algorithms import reduce_op
from mpidist.comm.algorithms.reduce_op import ReduceOp


class Checks:
    """Context of the argument checks of one operation; yields ``where``.

    Args:
        report: Called with a TypeError or ValueError of the checks, before it is raised.
    """

    __slots__ = ("_report", "_where")

    def __init__(self, where: str, report: Callable[[Exception], None] | None = None) -> None:
        self._where = where
        self._report = report

    def __enter__(self) -> str:
        return self._where

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._report is not None and isinstance(error, (TypeError, ValueError)):
            self._report(error)


def tensor(where: str, value: object, name: str) -> None:
    """Require a dense tensor on the CPU or on CUDA.

    Raises:
        TypeError: Not a tensor, not a dense one (sparse, nested, quantized), or one without memory
            of its own (a DTensor, a fake one, one of ``torch.func``).
        ValueError: On another device.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where} needs {name} to be a tensor; got {type(value).__name__}")
    if value.is_nested:
        raise TypeError(
            f"{where} needs {name} to be dense; got a nested tensor (pass its values(), or "
            "torch.nested.to_padded_tensor() of it)"
        )
    if value.layout is not torch.strided:
        raise TypeError(
            f"{where} needs {name} to be dense; got layout {value.layout} (use .to_dense())"
        )
    if value.is_quantized:
        raise TypeError(
            f"{where} needs {name} to hold plain numbers; got a quantized tensor, whose scale no "
            "message has (pass its int_repr(), and the scale)"
        )
    if not (value.is_cpu or value.is_cuda):
        raise ValueError(f"{where} needs {name} on the CPU or a CUDA device; got {value.device}")
    if not has_memory(value):
        raise TypeError(
            f"{where} needs {name} with memory of its own; got a {type(value).__name__} without "
            "(of a DTensor pass .to_local(); a function that torch traces cannot communicate)"
        )


def has_memory(value: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie at an address; that of a fake tensor is 0."""
    try:
        return value.data_ptr() != 0 or not value.numel()
    except RuntimeError:  # of torch.func
        return False


def sparse(where: str, value: torch.Tensor, name: str, op: ReduceOp) -> None:
    """Require a sparse COO tensor on the CPU or on CUDA, and SUM or AVG.

    Under other operations an absent element does not count as zero.

    Raises:
        ValueError: On another device, or another operation.
        TypeError: The dtype cannot be added up.
    """
    if not (value.is_cpu or value.is_cuda):
        raise ValueError(f"{where} needs {name} on the CPU or a CUDA device; got {value.device}")
    if op not in (reduce_op.SUM, reduce_op.AVG):
        raise ValueError(
            f"{where} reduces a sparse tensor by sum or avg; got {op} (use .to_dense() for another)"
        )
    operation(where, value.dtype, op)


def shape(where: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape given as a number of elements or as several.

    Raises:
        TypeError: Not whole numbers.
        ValueError: A negative one.
    """
    sizes = value if isinstance(value, Sequence) else (value,)
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{where} needs a shape of whole numbers; got {value!r}")
        if size < 0:
            raise ValueError(f"{where} needs a shape of at least 0; got {value!r}")
    return tuple(size.__index__() for size in sizes)


def dtype(where: str, value: object) -> None:
    """Require a dtype of torch."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{where} needs a torch.dtype; got {value!r}")


def tensors(where: str, values: object, name: str, count: int | None = None) -> None:
    """Require a list of ``count`` tensors on one device and of one dtype."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"{where} needs {name} to be a list of tensors; got {type(values).__name__}"
        )
    if not values:
        raise ValueError(f"{where} needs {name} to hold at least one tensor; got none")
    if count is not None and len(values) != count:
        raise ValueError(
            f"{where} needs {name} to hold {count} tensors, one a rank; got {len(values)}"
        )
    for place, value in enumerate(values):
        tensor(where, value, f"{name}[{place}]")
    same(where, values, name)


def same(where: str, values: Sequence[torch.Tensor], names: str) -> None:
    """Require one device and one dtype.

    Raises:
        ValueError: Mixed devices.
        TypeError: Mixed dtypes.
    """
    first = values[0]
    for value in values[1:]:
        if value.dtype is not first.dtype:
            raise TypeError(
                f"{where} needs {names} of one dtype; got {first.dtype} and {value.dtype}"
            )
        if value.device != first.device:
            raise ValueError(
                f"{where} needs {names} on one device; got {first.device} and {value.device}"
            )


def writable(where: str, value: torch.Tensor, name: str) -> None:
    """Refuse a tensor that autograd tracks.

    Raises:
        ValueError: autograd would not notice the change, and gradients would be wrong.
    """
    if value.requires_grad and torch.is_grad_enabled():
        what = "a leaf" if value.is_leaf else "a tensor"
        raise ValueError(
            f"{where} would write into {name}, {what} that requires grad; pass {name}.detach(), or "
            "call under torch.no_grad()"
        )


def rank(where: str, value: Any, name: str, size: int) -> None:
    """Require a rank of the group.

    Raises:
        TypeError: Not an int.
        ValueError: Outside 0 … W - 1.
    """
    if type(value) is not int and (
        isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__")
    ):
        raise TypeError(f"{where} needs {name} to be a rank (int); got {value!r}")
    if not 0 <= value < size:
        raise ValueError(f"{where} needs {name} in 0 ... {size - 1}; got {value}")


def ranks(where: str, values: Sequence[Any], size: int) -> None:
    """Require at least one rank of the group and none twice."""
    if not values or len(set(values)) != len(values):
        raise ValueError(f"{where} needs at least one rank and none twice; got {values}")
    for value in values:
        rank(where, value, "each of ranks", size)


def operation(where: str, dtype: torch.dtype, value: ReduceOp) -> None:
    """Require a reduction that is defined for the dtype.

    Raises:
        TypeError: Not defined for this dtype, or not a reduction.
        ValueError: An unknown name.
    """
    try:
        reduce_op.reduction(dtype, value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def tag(where: str, value: Any, highest: int) -> None:
    """Require a tag that MPI can carry."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value <= highest:
        raise ValueError(f"{where} needs a tag in 0 ... {highest}; got {value!r}")


def numel(where: str, value: torch.Tensor, name: str, expected: int, rule: str) -> None:
    """Require a number of elements.

    Raises:
        ValueError: Another number; the message explains the expected one by ``rule``.
    """
    if value.numel() != expected:
        raise ValueError(
            f"{where} needs {name} of {expected} elements ({rule}); got shape {tuple(value.shape)}"
        )


def splits(
    where: str, value: torch.Tensor, sizes: Sequence[int] | None, name: str, ranks: int
) -> list[int]:
    """Return the number of rows of ``value`` for each rank.

    Args:
        sizes: Rows per rank, or None (or empty) for equal parts.

    Raises:
        ValueError: Not one size for each rank, a negative size, or another sum than the rows.
    """
    if not value.dim():
        raise ValueError(
            f"{where} needs {name} with a first dimension to cut; got a tensor without dimensions"
        )
    rows = value.shape[0]
    if not sizes:
        if rows % ranks:
            raise ValueError(
                f"{where} needs {name} whose first dimension divides by {ranks}; got shape "
                f"{tuple(value.shape)}"
            )
        return [rows // ranks] * ranks
    sizes = [int(size) for size in sizes]
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{where} needs {ranks} sizes for {name}, none negative, that add up to its {rows} "
            f"rows; got {sizes}"
        )
    return sizes


def row_numel(
    where: str,
    output: torch.Tensor,
    input: torch.Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    own: int,
) -> int:
    """Return the elements of one row that an all-to-all exchanges; 0 if it exchanges none.

    Args:
        sends: Rows of ``input`` for each rank.
        receives: Rows of ``output`` from each rank.
        own: This rank.

    Raises:
        ValueError: Rows of different sizes, or a part for this rank itself that differs.
    """
    row = input[0].numel() if sum(sends) else output[0].numel() if sum(receives) else 0
    if sum(sends) and sum(receives) and output[0].numel() != row:
        raise ValueError(
            f"{where} needs rows of one size; got input {tuple(input.shape)} and output "
            f"{tuple(output.shape)}"
        )
    if sends[own] != receives[own]:
        raise ValueError(
            f"{where} sends itself {sends[own]} rows and expects {receives[own]}; the two must be "
            "equal"
        )
    return row


def pairs(
    where: str, outputs: object, inputs: object, output_factor: int, input_factor: int
) -> None:
    """Require pairs of tensors whose numbers of elements have a fixed ratio.

    Args:
        output_factor: Elements of an output for ``input_factor`` elements of its input.
    """
    if (
        not isinstance(outputs, (list, tuple))
        or not isinstance(inputs, (list, tuple))
        or len(outputs) != len(inputs)
    ):
        raise ValueError(f"{where} needs as many outputs as inputs")
    for output, input in zip(outputs, inputs, strict=True):
        tensor(where, input, "input")
        tensor(where, output, "output")
        same(where, (output, input), "output and input")
        writable(where, output, "output")
        if output.numel() * input_factor != input.numel() * output_factor:
            rule = "W times the input" if output_factor > 1 else "the input over W"
            numel(where, output, "output", input.numel() * output_factor // input_factor, rule)
            raise ValueError(
                f"{where} needs an input whose elements divide by {input_factor}; got shape "
                f"{tuple(input.shape)}"
            )


def root_list(where: str, value: torch.Tensor, values: Any, name: str, count: int) -> None:
    """Require the root's list: ``count`` tensors of as many elements as ``value``."""
    tensors(where, values, name, count)
    same(where, (value, values[0]), f"tensor and {name}")
    for place, item in enumerate(values):
        numel(where, item, f"{name}[{place}]", value.numel(), "tensor's number")


def no_list(where: str, values: object, name: str, root: int, own: int) -> None:
    """Require no list on a rank that is not the root."""
    if values:
        raise ValueError(f"{where} takes {name} on rank {root} alone; got one on rank {own}")
