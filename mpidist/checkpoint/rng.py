"""Random number generators of a rank: Python's, NumPy's, torch's on the CPU and the CUDA device."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_WORDS = 624  # in the table of MT19937


def state() -> dict[str, Any]:
    """Return the state of this process's generators as plain data; CUDA's if CUDA is in use."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = dict(numpy_state["state"])
    inner["key"] = inner["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": inner},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def require_state(saved: object) -> None:
    """Refuse a damaged state before any generator is set (pure).

    NumPy itself would accept a position beyond its table, and read from there.

    Raises:
        ValueError: Names the damaged part.
    """
    if not isinstance(saved, Mapping) or not {"python", "numpy", "torch", "cuda"} <= set(saved):
        raise ValueError("the state of the generators is damaged")
    _require_numpy(saved["numpy"])
    _require_python(saved["python"])
    for name in ("torch", "cuda"):
        state = saved[name]
        is_missing = state is None and name == "cuda"
        if not is_missing and not (
            isinstance(state, torch.Tensor) and state.dtype is torch.uint8 and state.dim() == 1
        ):
            raise ValueError(f"the state of torch's generator ({name}) is damaged")


def _require_numpy(saved: object) -> None:
    numpy_state = saved if isinstance(saved, Mapping) else {}
    inner = numpy_state.get("state")
    if not isinstance(inner, Mapping) or numpy_state.get("bit_generator") != "MT19937":
        raise ValueError("the state of NumPy's generator is damaged")
    key, place = inner.get("key"), inner.get("pos")
    if (
        type(key) is not list
        or len(key) != _WORDS
        or not all(type(word) is int and 0 <= word < 1 << 32 for word in key)
    ):
        raise ValueError("the state of NumPy's generator is damaged: its table")
    if type(place) is not int or not 0 <= place <= _WORDS:
        raise ValueError(
            "the state of NumPy's generator is damaged: its position lies beyond its table"
        )
    kept = numpy_state.get("gauss")
    if (
        numpy_state.get("has_gauss") not in (0, 1)
        or type(kept) not in (int, float)
        or (type(kept) is int and abs(kept) >> 53)
    ):
        raise ValueError("the state of NumPy's generator is damaged: its kept number")


def _require_python(python: object) -> None:
    if (
        not isinstance(python, (list, tuple))
        or len(python) != 3
        or not isinstance(python[1], (list, tuple))
    ):
        raise ValueError("the state of Python's generator is damaged")
    words = python[1]
    if (
        python[0] != 3
        or len(words) != _WORDS + 1
        or not all(type(word) is int and 0 <= word < 1 << 32 for word in words)
    ):
        raise ValueError("the state of Python's generator is damaged: its table")
    if words[-1] > _WORDS:
        raise ValueError(
            "the state of Python's generator is damaged: its position lies beyond its table"
        )
    if type(python[2]) not in (float, type(None)):
        raise ValueError("the state of Python's generator is damaged: its kept number")


def restore(saved: Mapping[str, Any]) -> None:
    """Set this process's generators to a saved ``state``; CUDA's if saved and available.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: The state is damaged.
    """
    require_state(saved)
    inner = dict(saved["numpy"]["state"])
    inner["key"] = np.array(inner["key"], dtype=np.uint32)
    python = saved["python"]
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state({**saved["numpy"], "state": inner})
    torch.set_rng_state(saved["torch"].cpu())
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"].cpu())


def reseed(digest: str, rank: int, world_size: int) -> None:
    """Seed the generators for a checkpoint of another number of ranks.

    The seeds are the same at each load and differ between ranks.

    Args:
        digest: Text that identifies the checkpoint.
    """
    seed = seed_of(digest, rank, world_size)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # also the CUDA devices'


def seed_of(digest: str, rank: int, world_size: int) -> int:
    """Return a seed from 0 to 2⁶³ - 1 (pure)."""
    return (
        int.from_bytes(
            hashlib.sha256(f"{digest} {rank} {world_size}".encode()).digest()[:8], "little"
        )
        >> 1
    )
