"""CUDA context of this rank: created before MPI starts, and bound to the library's threads.

MPI libraries look for a context when they start. Without one, Open MPI disables its shared-memory
transport for device memory for the whole job, and treats device pointers as host pointers until
CUDA is used (docs/decisions/0011). So the rank's primary context, which torch uses too, is created
first and is current while MPI starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

from mpidist.comm.mpi import launcher_env
from mpidist.comm.mpi.launcher_env import Launch

# "0": MPI gets no device pointers; "1": all operations do; unset: those that were tried.
ENV_CUDA_AWARE = "MPIDIST_CUDA_AWARE"
_ENV_VISIBLE = "CUDA_VISIBLE_DEVICES"

_log = logging.getLogger(__name__)

_index: int | None = None  # the device whose context was current when MPI started
_is_first: bool | None = None
_visible_at_start: str | None = None  # CUDA_VISIBLE_DEVICES when the context was created


def is_first() -> bool | None:
    """Return whether this process had a CUDA context when MPI started.

    Returns:
        None if there is no CUDA device, with ``MPIDIST_CUDA_AWARE=0``, or if other code started MPI
        and CUDA in an unknown order.
    """
    return _is_first


@contextlib.contextmanager
def current_at_start(is_running: bool, makes: bool = True) -> Iterator[None]:
    """Make this rank's CUDA context current in the calling thread while MPI starts.

    No context is created without a launcher (a world of one), where the launcher does not say which
    of several devices is this rank's, or where CUDA refuses (a forked process, a device in
    exclusive use). MPI then starts without a context.

    Args:
        is_running: MPI is already running, started by other code.
        makes: Make a context if there is none.
    """
    global _index, _is_first, _visible_at_start
    _index, _is_first, _visible_at_start = None, None, os.environ.get(_ENV_VISIBLE)
    # The environment first: torch's query for devices initializes the driver, which forked
    # processes cannot use afterwards.
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
    index = _choose(torch, held) if makes or held else None
    if index is None or not _create(torch, index):
        _is_first = False
        yield
        return
    _index, _is_first = index, True
    with torch.cuda.device(index):
        yield


def device_index(count: int, held: Sequence[int], current: int, launch: Launch) -> int | None:
    """Return the device whose context MPI shall find, or None for no context (pure).

    Args:
        count: Number of visible devices.
        held: Those with a context. If there are any, one of them is returned, because a context on
            another device would cost memory there.
        current: The calling thread's current device.
        launch: The launcher's variables.
    """
    if held:
        return current if current in held else held[0]
    if launch.local_rank is None:
        return 0 if count == 1 and launch.size is not None else None
    return launch.local_rank % count


def warn_of_late_visibility() -> None:
    """Log if CUDA_VISIBLE_DEVICES was set after CUDA started: ranks would share a device."""
    now = os.environ.get(_ENV_VISIBLE)
    if _index is not None and now != _visible_at_start:
        # Logged: a warning that is an error would stop this rank alone.
        _log.warning(
            "%s is %r but was %r when MPI and CUDA started: it has no effect. Set it before, or "
            "use mpidist.comm.device(), this rank's device",
            _ENV_VISIBLE,
            now,
            _visible_at_start,
        )


def inherited() -> Callable[[], None]:
    """Return a function that gives a new thread the calling thread's device and context.

    A new thread's current device is 0, and no context is bound to the thread, until it uses the
    CUDA runtime. MPI uses the driver's interface, which needs a bound context, and completes
    messages of device memory in any thread that calls MPI.
    """
    torch = sys.modules.get("torch")
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
        # A device in an error state raises again at its next use.
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_device(index)
            # Some versions of torch make no CUDA call for a device that is already current.
            torch.cuda.Stream(index).record_event()

    return bind


def _nothing() -> None:
    return None


def _devices_with_context(torch: ModuleType) -> list[int]:
    try:
        return [
            index
            for index in range(torch.cuda.device_count())
            if torch._C._cuda_hasPrimaryContext(index)
        ]
    # In a forked process torch counts devices by NVML, and CUDA refuses them.
    except RuntimeError:
        return []


def _choose(torch: ModuleType, held: Sequence[int]) -> int | None:
    current = torch.cuda.current_device() if held else 0
    return device_index(
        torch.cuda.device_count(), held, current, launcher_env.from_environment(os.environ)
    )


def _create(torch: ModuleType, index: int) -> bool:
    try:
        torch.zeros(1, device=torch.device("cuda", index))
        torch.cuda.synchronize(index)
    except RuntimeError:
        return False
    return True
