"""Kernels of functional collectives that torch's C++ does not forward to a Python group.

Compiled code calls ``torch.ops._c10d_functional``, whose C++ kernels call the group. torch's
``PyProcessGroup`` forwards most of these calls to Python. Two kernels use a C++ ``Backend``
instead, which a Python group lacks: ``all_gather_into_tensor_out`` (emitted by Inductor's
``bucket_all_gathers_fx``), because ``all_gather_single`` is not forwarded, and ``batch_p2p_ops``,
which queries whether the backend coalesces.

The ``torch.ops.c10d`` operators on a boxed group have the same gap and keep it: a kernel before
torch's would slow every eager call of the other backends in the process. Functions of
``torch.distributed`` call the group, not these operators.

Source: torch/csrc/distributed/c10d/PyProcessGroup.hpp and Functional.cpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from mpidist.c10d.native import native_of

Tensor = torch.Tensor
# A group by its name, boxed, or the group itself.
Named: TypeAlias = "str | torch.ScriptObject | dist.ProcessGroup"

_DEVICES = ("CPU", "CUDA")


@functools.cache
def register() -> torch.library.Library:
    """Register the kernels before torch's, once per process; other backends keep torch's kernels.

    Returns:
        The library, whose lifetime is that of the registration.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, kernel in (
        ("all_gather_into_tensor_out", _all_gather_into_tensor_out),
        ("batch_p2p_ops", _batch_p2p_ops),
    ):
        # torch has batch_p2p_ops since 2.12.
        if hasattr(torch.ops._c10d_functional, name):
            for device in _DEVICES:
                library.impl(name, kernel, device)
    return library


def _all_gather_into_tensor_out(
    input: Tensor, group_size: int, group_name: Named, *, out: Tensor
) -> Tensor:
    group = _native_group(group_name)
    if group is None:
        return _fallback("all_gather_into_tensor_out")(input, group_size, group_name, out=out)
    return _register_work(out, group.all_gather_single_coalesced([out], [input]))


def _batch_p2p_ops(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group_name: Named,
) -> list[Tensor]:
    group = _native_group(group_name)
    if group is None:
        return _fallback("batch_p2p_ops")(op_list, peer_list, tag_list, tensors, group_name)
    # In a mixed group, NCCL needs the messages of a batch launched together.
    device = tensors[0].device if tensors else None
    as_one = device is not None and group.coalesces(device)
    if as_one:
        group._start_coalescing(device)
    works = [
        group.recv([tensor], peer, tag) if call == "irecv" else group.send([tensor], peer, tag)
        for call, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True)
    ]
    if as_one:
        works = [group._end_coalescing(device)] * len(works)
    # A send has no result tensor. torch waits on an empty tensor or on the sent one.
    return [
        _register_work(tensor, work)
        if call == "irecv"
        else _register_work(_register_work(tensor, work).new_empty(0), work)
        for call, tensor, work in zip(op_list, tensors, works, strict=True)
    ]


def _register_work(tensor: Tensor, work: Work) -> Tensor:
    # wait_tensor finds the work by the tensor. Until then the registry keeps the Python work alive.
    torch._C._distributed_c10d._register_work(tensor, work)
    return tensor


def _native_group(named: Named) -> Any:
    """Return the torch group for a name or boxed group, or None if it is on another backend.

    torch passes names; since 2.13 also the boxed group itself.
    """
    if isinstance(named, str):
        group: Any = dist.distributed_c10d._resolve_process_group(named)  # type: ignore[arg-type]
    else:
        group = dist.ProcessGroup.unbox(named) if isinstance(named, torch.ScriptObject) else named
    return group if native_of(group) is not None else None


def _fallback(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops._c10d_functional, name).default
    return functools.partial(operator._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
