"""Replacement of torch's names of RPC, distributed autograd and its optimizer: the word ``rpc``.

Programs read the names from torch's modules; torch's own modules read them from each other, and
need torch's objects. As in ``ddp_name``, a module with replaced names becomes an instance of a
subclass of ``ModuleType`` with a property for each name, which attribute access from outside finds
before the module's dictionary, also in ``from torch.distributed.rpc import RRef``. A property
imports the module of mpidist on first access. Modules that are not imported yet are patched by a
finder when they are, because ``torch.distributed.optim`` takes as long as half of ``import torch``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

_OF_API = (
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
)
# By module of torch: the module of mpidist with the same names, and the names.
_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch.distributed.rpc": (
        "mpidist.rpc",
        (
            *_OF_API,
            "init_rpc",
            "enable_gil_profiling",
            "_get_debug_info",
            "_rref_context_get_debug_info",
            "_set_rpc_timeout",
            "BackendType",
            "PyRRef",
            "RRef",
            "RpcBackendOptions",
            "TensorPipeRpcBackendOptions",
            "WorkerInfo",
        ),
    ),
    "torch.distributed.rpc.api": (
        "mpidist.rpc.api",
        (*_OF_API, "WorkerInfo", "_all_gather", "_barrier", "_wait_all", "_wait_all_workers"),
    ),
    "torch.distributed.rpc.backend_registry": ("mpidist.rpc", ("BackendType",)),
    "torch.distributed.rpc.functions": ("mpidist.rpc.functions", ("async_execution",)),
    "torch.distributed.rpc.options": ("mpidist.rpc", ("TensorPipeRpcBackendOptions",)),
    "torch.distributed.autograd": (
        "mpidist.autograd",
        (
            "backward",
            "context",
            "get_gradients",
            "_current_context",
            "_get_debug_info",
            "_get_max_id",
            "_is_valid_context",
            "_new_context",
            "_release_context",
            "_retrieve_context",
        ),
    ),
    "torch.distributed.optim": ("mpidist.optim", ("DistributedOptimizer",)),
    "torch.distributed.optim.optimizer": ("mpidist.optim", ("DistributedOptimizer",)),
    "torch.distributed.nn": ("mpidist.nn", ("RemoteModule",)),
    "torch.distributed.nn.api.remote_module": ("mpidist.nn", ("RemoteModule",)),
}


def install() -> None:
    """Replace the names for all modules but torch's own."""
    for name, (ours, replaced) in _NAMES.items():
        kind = type(
            "_Replaced",
            (ModuleType,),
            {each: _Name(each, ours) for each in replaced},
        )
        module = sys.modules.get(name)
        if module is not None:
            module.__class__ = kind
        else:
            _finder.kinds[name] = kind
    if _finder.kinds and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def refuse(problem: str) -> None:
    """Let ``init_rpc`` raise the text of a mistake in ``MPIDIST_REPLACE``."""

    def init_rpc(*args: object, **kwargs: object) -> NoReturn:
        raise ValueError(problem)

    theirs: Any = importlib.import_module("torch.distributed.rpc")
    theirs.init_rpc = init_rpc


class _Name:
    """Property of a module: mpidist's object of a name, torch's for torch, or the caller's own."""

    def __init__(self, name: str, ours: str) -> None:
        self._name = name
        self._ours = ours
        self._put: Any = None

    def __get__(self, module: ModuleType | None, kind: type) -> Any:
        if module is None:
            return self
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking.startswith("torch."):
            try:
                return module.__dict__[self._name]
            except KeyError:
                # As of a module that is still being imported.
                raise AttributeError(
                    f"module {module.__name__!r} has no attribute {self._name!r}"
                ) from None
        if self._put is not None:
            return self._put
        return getattr(importlib.import_module(self._ours), self._name)

    def __set__(self, module: ModuleType, value: Any) -> None:
        # A caller that restores the name assigns the object that it has read, here or in the
        # module's dictionary.
        ours = getattr(importlib.import_module(self._ours), self._name)
        self._put = None if value is module.__dict__.get(self._name) or value is ours else value


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that lets Python find a module of torch, and changes its class after its import.

    Attributes:
        kinds: The classes by name of the module.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, type[ModuleType]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the ordinary spec of a module of torch whose names are replaced, else None."""
        kind = self.kinds.pop(fullname, None)
        spec = (
            importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if kind is not None
            else None
        )
        if spec is not None and spec.loader is not None and kind is not None:
            loader: Any = spec.loader
            loader.exec_module = _with_class(loader.exec_module, kind)
        return spec


def _with_class(
    execute: Callable[[ModuleType], None], kind: type[ModuleType]
) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        module.__class__ = kind

    return exec_module


_finder = _Finder()
