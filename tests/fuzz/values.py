"""Values of operands and objects, by seed and dtype. Pure."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from tests.fuzz.operands import Tensor
from tests.fuzz.programs import COMPLEX, SPECIALS, UNSIGNED, Call


def values_of(call: Call, tensor: Tensor) -> torch.Tensor:
    """Return the contiguous values of an input; an expanded dimension repeats values."""
    assert tensor.values is not None
    shape = [1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride, strict=True)]
    values = numbers(call.dtype, call.values, call.op, tensor.values, math.prod(shape)).view(shape)
    return values.expand(tensor.shape).contiguous()


def numbers(dtype: str, style: str, op: str, seed: str, count: int) -> torch.Tensor:
    """Return ``count`` values of a dtype.

    Args:
        style: As in ``Call.values``. Whole numbers are so small that reductions of four of them do
            not round, except in fp8.
    """
    rng = np.random.default_rng(random.Random(f"values {seed}").getrandbits(64))
    kind = getattr(torch, dtype)
    if not count:
        return torch.empty(0, dtype=kind)
    if dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, count).astype(np.bool_))
    if style in ("bits", "wide"):
        return torch.from_numpy(rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8)).view(
            kind
        )
    parts = 2 if dtype in COMPLEX else 1
    if style == "normal":
        real = rng.standard_normal(count * parts)
    elif op == "product":
        real = rng.choice(
            [1.0, 2.0] if dtype in UNSIGNED else [-2.0, -1.0, 1.0, 2.0], count * parts
        )
    else:
        real = rng.integers(
            0 if dtype in UNSIGNED or "e8m0" in dtype else -8, 9, count * parts
        ).astype(np.float64)
    if style == "special" and dtype in SPECIALS:
        places = rng.random(count) < 0.1
        real[places] = rng.choice([np.nan, np.inf, -np.inf], int(places.sum()))
    if dtype in UNSIGNED:
        return torch.from_numpy(real.astype(dtype))
    if parts == 2:
        return torch.view_as_complex(torch.from_numpy(real.reshape(count, 2))).to(kind)
    return torch.from_numpy(real).to(kind)


def obj(seed: str, count: int, odd_strides: bool = True, by_torch: bool = False) -> object:
    """Return a nested object that contains a tensor of ``count`` elements."""
    rng = random.Random(f"object {seed}")
    dtype = rng.choice(("float32", "int64", "bfloat16", "bool", "complex64", "float8_e5m2"))
    if by_torch and "float8" in dtype:
        # torch's own pickle does not support float8.
        dtype = "float16"
    tensor = numbers(dtype, "whole", "sum", seed, count)
    if rng.random() < 0.3 and (count != 1 or odd_strides):
        tensor = torch.stack([tensor, tensor], 1)[:, 0]
    return {
        "seed": seed,
        "tensor": tensor,
        "array": np.arange(rng.choice((0, 1, 5, count))),
        "text": "x" * rng.choice((0, 3, 70_000 if rng.random() < 0.1 else 50)),
        rng.randrange(9): [None, (1.5, float("inf")), {"n": 1 << 70}],
    }
