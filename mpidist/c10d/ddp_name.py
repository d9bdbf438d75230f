"""Replacement of torch's name ``DistributedDataParallel`` under ``MPIDIST_REPLACE=ddp``.

A framework uses the name for construction and for ``isinstance``. torch's own module needs its own
class under the same name in its globals. Therefore the two torch modules with the name get a
property, which attribute access from outside finds before the globals, also in ``from
torch.nn.parallel import DistributedDataParallel``. The property imports ``mpidist.ddp`` on first
access, because an import of ``mpidist.ddp`` may itself have begun ``import torch``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from types import ModuleType

NAME = "DistributedDataParallel"
_MODULES = ("torch.nn.parallel", "torch.nn.parallel.distributed")
# Modules of torch that use torch's own reducer, or attributes that Dynamo sets on torch's class.
_OF_TORCHS_CLASS = (
    "torch._dynamo.",
    "torch.nn.parallel",
    "torch.distributed._composable.",
    "torch.distributed.algorithms.",
    "torch.distributed.pipelining.",
)


def install() -> None:
    """Replace the name for all modules but those of torch that need torch's class."""
    for name in _MODULES:
        importlib.import_module(name).__class__ = _Replaced


class _Replaced(ModuleType):
    """A torch module whose ``DistributedDataParallel`` is that of mpidist."""

    @property
    def DistributedDataParallel(self) -> type:
        """The class of mpidist, or the class that a caller has assigned."""
        original = self.__dict__[NAME]
        asking = sys._getframe(1).f_globals.get("__name__", "")
        # A child process of multiprocessing is no rank; its groups are torch's (``replacement``).
        if asking.startswith(_OF_TORCHS_CLASS) or multiprocessing.parent_process() is not None:
            return original
        return (
            self.__dict__.get("_mpidist_put")
            or importlib.import_module("mpidist.ddp.module").DistributedDataParallel
        )

    @DistributedDataParallel.setter
    def DistributedDataParallel(self, value: type) -> None:
        # A caller that restores the name assigns the class from the module's dictionary: torch's.
        self.__dict__["_mpidist_put"] = None if value is self.__dict__[NAME] else value
