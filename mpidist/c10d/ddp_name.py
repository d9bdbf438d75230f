"""torch's name ``DistributedDataParallel``, which with ``MPIDIST_REPLACE=ddp`` is ``mpidist.ddp.DistributedDataParallel``.

A framework constructs the class by that name and asks ``isinstance`` by it. torch's own module
needs its own class under the same name, in its globals. So the two modules that have the name get a
property, which a look-up from outside meets before their globals: ``from torch.nn.parallel import
DistributedDataParallel`` included. It imports ours when it is first asked, because ``import torch``
itself may have been begun by an import of ``mpidist.ddp``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from types import ModuleType
from typing import Any

NAME = "DistributedDataParallel"
_MODULES = ("torch.nn.parallel", "torch.nn.parallel.distributed")
# Parts of torch that reach into torch's own reducer, or into what Dynamo notes on torch's own
# class.
_OF_TORCHS_CLASS = (
    "torch._dynamo.",
    "torch.nn.parallel",
    "torch.distributed._composable.",
    "torch.distributed.algorithms.",
    "torch.distributed.pipelining.",
)


def install() -> None:
    """Let the name mean our class for everybody but those parts of torch that are about torch's reducer."""
    for name in _MODULES:
        importlib.import_module(name).__class__ = _Replaced


class _Replaced(ModuleType):
    """A module of torch whose ``DistributedDataParallel`` is ours."""

    @property
    def DistributedDataParallel(self) -> Any:
        """Our class, or what a caller has put in its place."""
        original = self.__dict__[NAME]
        asking = sys._getframe(1).f_globals.get("__name__", "")
        # What multiprocessing has started is no rank; its groups are torch's (``replacement``).
        if asking.startswith(_OF_TORCHS_CLASS) or multiprocessing.parent_process() is not None:
            return original
        return (
            self.__dict__.get("_mpidist_put")
            or importlib.import_module("mpidist.ddp.module").DistributedDataParallel
        )

    @DistributedDataParallel.setter
    def DistributedDataParallel(self, value: Any) -> None:
        # Who has put a class of its own here puts back what lay in the module's dictionary:
        # torch's.
        self.__dict__["_mpidist_put"] = None if value is self.__dict__[NAME] else value
