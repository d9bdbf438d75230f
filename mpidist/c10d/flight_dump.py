"""Flight records of mpidist where torch's functions return those of a backend.

``torch._C._distributed_c10d._dump_fr_trace`` and its two relatives take the name of a backend from
torch 2.15 on. Under the name "mpidist" they return the operations of this process's groups; other
names go to torch's own function.
"""

from __future__ import annotations

import functools
import importlib
import json
import pickle
from collections.abc import Callable
from typing import Any

_OURS = "mpidist"


def install() -> None:
    """Replace torch's functions, once per process."""
    module: Any = importlib.import_module("torch._C._distributed_c10d")
    for name, own in (
        ("_dump_fr_trace", _pickled),
        ("_dump_fr_trace_json", _as_json),
        ("_dump_fr_trace_file", _into_file),
    ):
        original = getattr(module, name, None)
        # torch 2.14 and older have no function that writes a file.
        if original is None or not hasattr(original, "__wrapped__"):
            setattr(module, name, _for_backend(own, original))


def _for_backend(
    own: Callable[..., Any], original: Callable[..., Any] | None
) -> Callable[..., Any]:
    def dump(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        # The last argument, where it is given by place.
        if backend is None and args and isinstance(args[-1], str):
            *args, backend = args  # type: ignore[assignment]
        if backend == _OURS:
            return own(*args, **kwargs)
        if original is None:
            raise RuntimeError(f'this torch writes no such file for backend "{backend}"')
        return original(*args, **kwargs, **({} if backend is None else {"backend": backend}))

    functools.update_wrapper(dump, original or own)
    return dump


def _record(include_collectives: bool, only_active: bool) -> dict[str, Any]:
    from mpidist.comm.execution.group_state import open_groups
    from mpidist.comm.watchdog import flight_record

    return flight_record.record(
        open_groups(), include_collectives=include_collectives, only_active=only_active
    )


# The arguments have torch's names.
def _pickled(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
) -> bytes:
    return pickle.dumps(_record(includeCollectives is not False, bool(onlyActive)))


def _as_json(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
    return json.dumps(_record(includeCollectives is not False, bool(onlyActive))).encode()


def _into_file(rank: int, *args: Any, **kwargs: Any) -> None:
    from mpidist.comm.execution.group_state import open_groups
    from mpidist.comm.mpi import runtime
    from mpidist.comm.watchdog import flight_record

    groups = open_groups()
    flight_record.write(groups, rank, runtime.world().first if groups else None)
