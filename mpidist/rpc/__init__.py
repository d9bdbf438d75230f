"""Remote procedure calls with torch's names and meanings, over MPI point-to-point messages.

Path of a call: ``api`` → ``calls`` (by ``names`` and ``values``) → ``comm.transport`` ⇝ the peer's
``threads`` → ``serving`` → the function → ``calls.wire`` ⇝ the caller's ``serving`` → ``calls``. An
``agent`` holds these parts; ``threads.polling`` decides which thread receives.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "init_rpc": "api",
    "shutdown": "api",
    "rpc_sync": "api",
    "rpc_async": "api",
    "remote": "api",
    "get_worker_info": "api",
    "get_rpc_timeout": "api",
    "wait_all": "api",
    "_wait_all": "api",
    "_set_rpc_timeout": "api",
    "enable_gil_profiling": "api",
    "_get_debug_info": "api",
    "_rref_context_get_debug_info": "api",
    "_get_current_rpc_agent": "api",
    "_is_current_rpc_agent_set": "api",
    "_delete_all_user_and_unforked_owner_rrefs": "api",
    "RRef": "rref",
    "PyRRef": "rref",
    "WorkerInfo": "worker",
    "RpcBackendOptions": "options",
    "BackendType": "options",
}
# torch's name, so that programs need to change only the import.
_ALIASES = {"TensorPipeRpcBackendOptions": ("options", "RpcBackendOptions")}
_MODULES = ("api", "constants", "functions", "options")
__all__ = sorted(name for name in (*_HOMES, *_ALIASES) if not name.startswith("_"))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mpidist.rpc.{name}")
    module, attribute = _ALIASES.get(name) or (_HOMES.get(name), name)
    if module is None:
        raise AttributeError(f"module 'mpidist.rpc' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"mpidist.rpc.{module}"), attribute)
    return found
