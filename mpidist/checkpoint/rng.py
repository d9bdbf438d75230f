"""State of a rank's random number generators: Python's, NumPy's and torch's on the CPU and on the rank's CUDA device."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


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


def restore(saved: Mapping[str, Any]) -> None:
    """Set this process's generators to what ``state`` returned; CUDA's if it was saved and there is a device.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: It is no such state.
    """
    inner = dict(saved["numpy"]["state"])
    inner["key"] = np.array(inner["key"], dtype=np.uint32)
    python = saved["python"]
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state({**saved["numpy"], "state": inner})
    torch.set_rng_state(saved["torch"].cpu())
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"].cpu())


def reseed(digest: str, rank: int, world_size: int) -> None:
    """Seed the generators where those of another number of ranks were saved: the same seeds at each load, others on each rank.

    Args:
        digest: Text that stands for the checkpoint.
    """
    seed = seed_of(digest, rank, world_size)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # the CUDA devices' generators, too


def seed_of(digest: str, rank: int, world_size: int) -> int:
    """Return a seed from 0 to 2⁶³ - 1 (pure)."""
    return int.from_bytes(hashlib.sha256(f"{digest} {rank} {world_size}".encode()).digest()[:8], "little") >> 1
