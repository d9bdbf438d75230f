"""The functional collectives that C++ does not carry to a group in Python.

Compiled code calls ``torch.ops._c10d_functional``, whose C++ kernels call the group. torch's ``PyProcessGroup`` passes most of
these calls on to Python, ``all_gather_single`` alone not: ``all_gather_into_tensor_out`` then asks for a C++ ``Backend``, which a
group in Python has not. Inductor's passes that put several all-gathers into one (``bucket_all_gathers_fx``) emit that operator.

Source: torch/csrc/distributed/c10d/PyProcessGroup.hpp and Functional.cpp.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

_OPERATOR = "all_gather_into_tensor_out"


@functools.cache
def register() -> torch.library.Library | None:
    """Put our kernel before torch's; once in a process. Groups of other backends go on to torch's.

    Returns:
        What keeps the kernel registered, or None where torch has no such operator.
    """
    if not hasattr(torch.ops._c10d_functional, _OPERATOR):
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        library.impl(_OPERATOR, _all_gather_into_tensor_out, device)
    return library


def _all_gather_into_tensor_out(input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor) -> torch.Tensor:
    group = _group(group_name)
    if getattr(group, "native", None) is None:
        operator = getattr(torch.ops._c10d_functional, _OPERATOR).default
        everywhere = torch._C.DispatchKey.CompositeExplicitAutograd
        return operator._op_dk(everywhere, input, group_size, group_name, out=out)
    work = group.all_gather_single_coalesced([out], [input])
    # wait_tensor finds the work by the tensor, and keeps its Python half alive until then.
    torch._C._distributed_c10d._register_work(out, work)
    return out


def _group(named: Any) -> Any:
    if isinstance(named, torch.ScriptObject):
        return dist.ProcessGroup.unbox(named)
    return dist.distributed_c10d._resolve_process_group(named) if isinstance(named, str) else named  # type: ignore[arg-type]
