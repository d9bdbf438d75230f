"""Checkpoints of training runs: saving, loading → reading → training, files → manifest.

``commits`` → ``slots``, ``buddies``, ``replicas``: state in the nodes' memory. ``dtensors`` has a
rank's part of sharded parameters, ``digested_file`` writes files with their digests, ``progress``
notes what is saved for a restart, ``sampler`` keeps the position in an epoch, ``rng`` the
generators' states, ``preemption`` handles the scheduler's signals. An import of the package starts
nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Preemption": "preemption",
    "REQUEUE_EXIT_CODE": "progress",
    "ResumableSampler": "sampler",
    "Resumed": "loading",
    "commit": "commits",
    "ignore_signals": "preemption",
    "latest": "files",
    "load": "loading",
    "save": "saving",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpidist.checkpoint' has no attribute {name!r}")
    found = globals()[name] = getattr(
        importlib.import_module(f"mpidist.checkpoint.{_HOMES[name]}"), name
    )
    return found
