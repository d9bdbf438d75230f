"""Distributed PyTorch over the MPI that a cluster already has.

Importing it starts neither MPI nor CUDA. Its packages are imported at the first use of their names
(``mpidist.ddp``).
"""

import importlib
from types import ModuleType

__version__ = "0.2.0"

_PACKAGES = (
    "autograd",
    "checkpoint",
    "comm",
    "ddp",
    "elastic",
    "errors",
    "frameworks",
    "nn",
    "optim",
    "rpc",
    "slurm",
    "trace",
    "tune",
)


def __getattr__(name: str) -> ModuleType:
    """Import a public package or module of mpidist at the first use of its name."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the module's own names and the public packages."""
    return sorted({*globals(), *_PACKAGES})
