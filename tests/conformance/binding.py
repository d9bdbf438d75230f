"""Bindings of torch's names for its distributed modules to mpidist's modules, in test suites."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch.distributed.autograd
import torch.distributed.rpc.api  # noqa: F401

# Names of torch, and the modules of mpidist with the same contents.
PLACES = {
    "torch.distributed.rpc": "mpidist.rpc",
    "torch.distributed.rpc.api": "mpidist.rpc.api",
    "torch.distributed.autograd": "mpidist.autograd",
    "torch.distributed.optim": "mpidist.optim",
    "torch.distributed.nn": "mpidist.nn",
}
# Modules that tests import within functions, to set switches or to read counters.
IMPORTED_LATE = ("torch.distributed.rpc.api", "torch.distributed.autograd")


def bound(ours: str) -> types.ModuleType:
    """Return a module that replaces one of torch, and reads mpidist's module at each use."""
    module = types.ModuleType(ours)
    read = lambda name: getattr(importlib.import_module(ours), name)  # noqa: E731
    module.__getattr__ = read  # type: ignore[method-assign]
    return module


def counterpart(name: str, found: Any) -> Any:
    """Return the object for a suite's global name; None if torch's own object stays."""
    if isinstance(found, types.ModuleType):
        ours = PLACES.get(found.__name__)
        return (
            bound(ours) if ours is not None and importlib.util.find_spec(ours) is not None else None
        )
    for theirs, ours in PLACES.items():
        module = sys.modules.get(theirs)
        if (
            module is not None
            and getattr(module, name, None) is found
            and importlib.util.find_spec(ours) is not None
        ):
            return getattr(importlib.import_module(ours), name, None)
    return None


@contextlib.contextmanager
def ours_in_place_of_torchs(
    modules: Iterable[types.ModuleType], more: Mapping[str, Any]
) -> Iterator[None]:
    """Bind torch's names in the suites to mpidist.

    Args:
        modules: Modules of the suites.
        more: Further names and their objects, in any of the modules.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            names = {
                name: counterpart(name, found)
                for name, found in vars(module).items()
                if not name.startswith("__")
            }
            names |= {name: found for name, found in more.items() if hasattr(module, name)}
            for name, found in names.items():
                if found is not None:
                    stack.enter_context(mock.patch.object(module, name, found))
        for name in IMPORTED_LATE:
            parent, _, attribute = name.rpartition(".")
            ours_here = importlib.import_module(PLACES[name])
            stack.enter_context(mock.patch.object(sys.modules[parent], attribute, ours_here))
            # mock.patch.dict would remove modules from sys.modules that a test imports, such as
            # torch._dynamo.
            stack.callback(sys.modules.__setitem__, name, sys.modules[name])
            sys.modules[name] = ours_here
        yield
