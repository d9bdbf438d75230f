"""CUDA context of this rank: made before MPI starts, and bound to the threads of this library.

MPI libraries look for a context when they start. Without one, Open MPI leaves its shared-memory
transport for device memory off for the whole job, and takes device pointers for host pointers until
CUDA is used (docs/decisions/0011). So the rank's primary context, the one that torch uses, is made
first, and is current while MPI starts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpidist.comm.mpi import launcher_env
from mpidist.comm.mpi.launcher_env import Launch

# "0": no operation takes device pointers; "1": all do; unset: ask and try
ENV_CUDA_AWARE = "MPIDIST_CUDA_AWARE"
_ENV_VISIBLE = "CUDA_VISIBLE_DEVICES"

_index: int | None = None  # the device whose context was current when MPI started
_is_first: bool | None = None
_visible_at_start: str | None = None  # what CUDA_VISIBLE_DEVICES was when the context was made


def is_first() -> bool | None:
    """Say whether this process had a CUDA context when MPI started.

    Returns:
        None if there is no CUDA device, ``MPIDIST_CUDA_AWARE=0`` says that MPI gets no device
        memory, or other code has started MPI and CUDA in an order that was not recorded.
    """
    return _is_first


@contextlib.contextmanager
def current_at_start(is_running: bool, makes: bool = True) -> Iterator[None]:
    """Have this rank's CUDA context current in the calling thread while MPI starts.

    None is made without a launcher (a world of one), where the launcher does not say which of
    several devices is this rank's, or where CUDA refuses (a forked process, a device in exclusive
    use): MPI then starts without one.

    Args:
        is_running: MPI runs already, started by other code.
        makes: Make a context if there is none.
    """
    global _index, _is_first, _visible_at_start
    _index, _is_first, _visible_at_start = None, None, os.environ.get(_ENV_VISIBLE)
    # The environment first: to ask torch for devices initialises the driver, which forked processes
    # cannot use any more.
    if os.environ.get(ENV_CUDA_AWARE) == "0":
        yield
        return
    import torch

    if not torch.cuda.is_available():
        yield
        return
    held = _devices_with_context(torch)
    if is_running:
        _is_first = None if held else False
        yield
        return
    index = _chosen(torch, held) if makes or held else None
    if index is None or not _make(torch, index):
        _is_first = False
        yield
        return
    _index, _is_first = index, True
    with torch.cuda.device(index):
        yield


def device_index(count: int, held: Sequence[int], current: int, told: Launch) -> int | None:
    """Return the index of the device whose context MPI is to find, or None if none should be made; pure.

    Args:
        count: Devices that this process sees.
        held: Those of them that have a context; then it is one of these, or the user's choice would
            cost memory on a second one.
        current: The calling thread's current device.
        told: The launcher's word.
    """
    if held:
        return current if current in held else held[0]
    if told.local_rank is None:
        return 0 if count == 1 and told.size is not None else None
    return told.local_rank % count


def warn_of_late_visibility() -> None:
    """Warn of a CUDA_VISIBLE_DEVICES that was set after CUDA had started, where it has no effect: ranks would share a device."""
    now = os.environ.get(_ENV_VISIBLE)
    if _index is not None and now != _visible_at_start:
        warnings.warn(
            f"{_ENV_VISIBLE} is {now!r} but was {_visible_at_start!r} when MPI and CUDA started: "
            "it has no effect. Set it "
            "before, or use mpidist.comm.device(), this rank's device",
            RuntimeWarning,
            stacklevel=2,
        )


def inherited() -> Callable[[], None]:
    """Return what a new thread of ours calls first: it makes the calling thread's device current there, and binds its context.

    A new thread's current device is 0, and no context is bound to it, until it uses the CUDA
    runtime. MPI works by the driver's interface, which needs one, and completes messages of device
    memory in whichever thread calls it.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _nothing
    held = _devices_with_context(torch)
    current = torch.cuda.current_device()
    index = (
        current if current in held else _index if _index is not None else held[0] if held else None
    )
    if index is None:
        return _nothing

    def bind() -> None:
        # a device in an error state: whoever uses it will hear of that
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_device(index)
            # not every torch calls CUDA for a device that is current already
            torch.cuda.Stream(index).record_event()

    return bind


def _nothing() -> None:
    return None


def _devices_with_context(torch: Any) -> list[int]:
    try:
        return [
            index
            for index in range(torch.cuda.device_count())
            if torch._C._cuda_hasPrimaryContext(index)
        ]
    # torch has counted devices by NVML, and CUDA refuses them: a forked process
    except RuntimeError:
        return []


def _chosen(torch: Any, held: Sequence[int]) -> int | None:
    current = torch.cuda.current_device() if held else 0
    return device_index(
        torch.cuda.device_count(), held, current, launcher_env.from_environment(os.environ)
    )


def _make(torch: Any, index: int) -> bool:
    try:
        torch.zeros(1, device=torch.device("cuda", index))
        torch.cuda.synchronize(index)
    except RuntimeError:
        return False
    return True
