"""Expected results of a collective by NumPy and torch in one process, from all ranks' data. Pure.

A result is (values, tolerance). Tolerance None requires equal bits, or equal numbers where zeros
have two signs and NaN many bit patterns; a tensor is the allowed absolute error per element.
"""

from __future__ import annotations

import torch

from tests.fuzz.operands import Operands, exchanged, operands
from tests.fuzz.programs import COMPLEX, FLOAT8, FLOATS, Call
from tests.fuzz.values import values_of
from tests.tools.support import reduced

Result = tuple[torch.Tensor, torch.Tensor | None]
ACCUMULATES_IN = {"float64": torch.float64, "complex128": torch.float64}


def expected(call: Call, rank: int, size: int) -> list[Result | None]:
    """Return a rank's expected outputs, in the order of ``Operands.outputs``; None if unchanged."""
    all_operands = [operands(call, place, size) for place in range(size)]
    if not all_operands[rank].outputs:
        return []
    inputs = [
        _inputs(call, one) for one in all_operands
    ]  # by rank, then in the order of the rank's inputs
    kind, root, counts = call.kind, call.root, call.counts
    if kind in ("all_reduce", "all_reduce_coalesced", "reduce"):
        return [_reduced(call, [values[i] for values in inputs]) for i in range(len(inputs[rank]))]
    if kind in ("broadcast", "broadcast_coalesced"):
        return [] if rank == root else [(values, None) for values in inputs[root]]
    if kind in ("all_gather", "gather"):
        return [(values[0], None) for values in inputs]
    if kind.startswith("all_gather_into"):
        return [
            (torch.cat([values[i] for values in inputs]), None) for i in range(len(inputs[rank]))
        ]
    if kind == "scatter":
        return [(inputs[root][rank], None)]
    if kind == "reduce_scatter":
        return [_reduced(call, [values[rank] for values in inputs])]
    if kind.startswith("reduce_scatter_tensor"):
        return [
            _reduced(call, [values[i][rank * n : (rank + 1) * n] for values in inputs])
            for i, n in enumerate(counts)
        ]  # fmt: skip
    if kind == "all_to_all":
        return [(values[rank], None) for values in inputs]
    if kind == "all_to_all_single":
        parts = []
        for place, values in enumerate(inputs):
            sends = [n * call.row for n in exchanged(call, place, size)[0]]
            parts.append(values[0].split(sends)[rank])
        return [(torch.cat(parts), None)]
    raise AssertionError(kind)


def _inputs(call: Call, one: Operands) -> list[torch.Tensor]:
    return [values_of(call, one.tensors[place]).reshape(-1) for place in one.inputs]


def _reduced(call: Call, parts: list[torch.Tensor]) -> Result:
    dtype = getattr(torch, call.dtype)
    if call.factors:
        if dtype.is_floating_point:
            scaled = [
                part.double() * factor for part, factor in zip(parts, call.factors, strict=True)
            ]
            values = reduced(scaled, "sum").to(dtype)
        else:
            scaled = [
                _times(part, factor) for part, factor in zip(parts, call.factors, strict=True)
            ]
            values = reduced(scaled, "sum")
        parts = scaled
    else:
        values = reduced(parts, call.op)
    return values, _tolerance(call, parts, values)


def _times(part: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.from_numpy((part.numpy() * factor).astype(part.numpy().dtype))


def _tolerance(call: Call, parts: list[torch.Tensor], values: torch.Tensor) -> torch.Tensor | None:
    exact = call.values != "normal" or call.op in ("min", "max")
    if (
        call.dtype not in (*FLOATS, *FLOAT8, *COMPLEX)
        or exact
        or (len(parts) == 1 and not call.factors)
    ):
        return None
    # Each of the W - 1 sums rounds in the accumulation dtype; the result rounds once to the
    # tensor's dtype.
    wide = torch.finfo(ACCUMULATES_IN.get(call.dtype, torch.float32)).eps
    narrow = torch.finfo(getattr(torch, call.dtype)).eps
    total = sum(_magnitude(part) for part in parts)
    assert isinstance(total, torch.Tensor)
    return (
        4 * len(parts) * wide * total
        + 2 * narrow * _magnitude(values)
        + torch.finfo(getattr(torch, call.dtype)).tiny
    )


def _magnitude(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.complex128).abs() if part.is_complex() else part.double().abs()
