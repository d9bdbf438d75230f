"""Capabilities of the job's MPI library: reported by the library, and tried for device memory.

A library that reports CUDA awareness may still crash in one operation. So device memory is staged
until ``mpidist doctor`` has tried each operation in a job of its own (``capability_trial``). The
results are cached in the user's folder by MPI library, version, device, relevant settings, and
whether MPI found a CUDA context when it started (``cuda_context``). ``MPIDIST_CUDA_AWARE=0`` and
``=1``, the same on all ranks, replace the library's report and the cache.

The two ranks of a trial see the devices of one process; ``visible_devices`` handles ranks that see
other devices.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mpidist import cache
from mpidist.comm.discovery import capability_trial, installed, library_report, visible_devices
from mpidist.comm.discovery.trial_operations import OPERATIONS, REDUCTIONS, VERSION, WORKS
from mpidist.comm.mpi import cuda_context, launcher_env, runtime
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.cuda_context import ENV_CUDA_AWARE
from mpidist.comm.mpi.library import MPI, has_ulfm, library_name
from mpidist.comm.mpi.nonblocking import NONBLOCKING, MpiCalls
from mpidist.errors import MpidistError

_log = logging.getLogger(__name__)

# Setting of the environment, as one byte that ranks can compare.
_UNSET, _OFF, _ON, _UNREADABLE = range(4)
_FORCED = {"": _UNSET, "0": _OFF, "1": _ON}
_FORCED_WORDS = ("unset", "0", "1", "neither 0 nor 1")

_KIND = "device-operations"  # in the cache
# Key: device, and whether CUDA started before MPI. Value: the table that this process has tried or
# loaded; None if the cache has none.
_tables: dict[tuple[str, bool], dict[str, str] | None] = {}


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of one MPI library.

    Attributes:
        library: Its name and version: the first line of MPI_Get_library_version.
        standard: The MPI standard that it follows, (major, minor).
        survives_failures: ULFM is available and enabled: pending calls can be revoked, a group can
            shrink.
        cuda_aware: It accepts CUDA's device pointers; None if it does not report this.
        cuda_source: Source of ``cuda_aware``.
        rocm_aware: It accepts ROCm's device pointers; None if it does not report this.
        rocm_source: Source of ``rocm_aware``.
        cuda_before_mpi: This rank had a CUDA context when MPI started; without one, Open MPI
            disables part of its support for device memory. None without a device, with
            ``MPIDIST_CUDA_AWARE=0``, and if other code started both.
        operations: For each operation of ``trial_operations.OPERATIONS``, on memory of this rank's
            CUDA device: "works …", the reason why it does not, or "unknown" if it was not tried.
    """

    library: str
    standard: tuple[int, int]
    survives_failures: bool
    cuda_aware: bool | None
    cuda_source: str
    rocm_aware: bool | None
    rocm_source: str
    cuda_before_mpi: bool | None
    operations: Mapping[str, str] = field(hash=False)


def capabilities() -> Capabilities:
    """Return what the MPI library reports; nothing is tried.

    Collective: if MPI has not started, as ``init``.
    """
    cuda_aware, cuda_source = library_report.cuda_support()
    rocm_aware, rocm_source = library_report.rocm_support()
    return Capabilities(
        library=library_name(),
        standard=MPI.Get_version(),
        survives_failures=has_ulfm(),
        cuda_aware=cuda_aware,
        cuda_source=cuda_source,
        rocm_aware=rocm_aware,
        rocm_source=rocm_source,
        cuda_before_mpi=cuda_context.is_first(),
        operations=_device_table(runtime.device()),
    )


# --- operations on device memory ---


def known_operations(device: torch.device) -> frozenset[str]:
    """Return the operations that work on memory of a device, as far as this rank knows.

    Local. The environment's setting comes first, then a "no" reported by the library, then the
    cache.

    Raises:
        ValueError: ``MPIDIST_CUDA_AWARE`` is neither 0 nor 1.
    """
    if _forced() is None and visible_devices.may_be_unseen(device):
        return frozenset()
    return _working(_known_table(device, _is_cuda_first()) or {})


def agreed_operations(comm: Communicator, device: torch.device) -> frozenset[str]:
    """Return the operations that may be called on memory of a device; the same set on all ranks.

    Other operations are staged through host memory. Rank 0 decides for all, by what
    ``known_operations`` says there, for the order in which MPI and CUDA have started on all ranks.
    Where the library does not deny that it takes device memory and nothing has been tried, the set
    is empty, and rank 0 of the job logs that once. Reductions are in the set as blocking calls
    only, because under Open MPI a non-blocking reduction of device memory crashes. If ``comm``
    replaces blocking calls by their non-blocking form, the set has no reductions, and other
    collectives only if their non-blocking form works.

    Collective: over ``comm``, the first time for a device type; later calls are local.

    Raises:
        MpidistError: ``MPIDIST_CUDA_AWARE`` differs between ranks, or rank 0 failed (all ranks).
        ValueError: It is neither 0 nor 1 (all ranks).
    """
    held = comm.device_operations.get(device.type)
    if held is None:
        held, warning = _agree(comm, device)
        comm.device_operations[device.type] = held
        if device.type == "cuda":
            cuda_context.warn_of_late_visibility()
        if warning:
            _warn_once(warning)
    return held if takes_blocking_calls(comm) else _nonblocking_only(held)


def try_operations(device: torch.device) -> None:
    """Try each operation on memory of a device and cache the results, unless they are known.

    Local: for a process of its own, and no rank of a job, whose answer is that of later jobs in the
    same environment, in whichever order they start CUDA and MPI.
    Blocks: some seconds, and a minute more for each operation that hangs.

    Raises:
        ValueError: ``MPIDIST_CUDA_AWARE`` is neither 0 nor 1.
    """
    for is_cuda_first in (True, False):
        if _known_table(device, is_cuda_first) is None:
            _try_operations(device, is_cuda_first)


def takes_blocking_calls(comm: Communicator) -> bool:
    """Return whether blocking calls on ``comm.mpi`` reach MPI, not replaced by a wrapper."""
    return not isinstance(comm.mpi, MpiCalls)


def _nonblocking_only(working: frozenset[str]) -> frozenset[str]:
    return frozenset(
        name
        for name in working
        if name not in REDUCTIONS and NONBLOCKING.get(name, name) in working
    )


def _agree(comm: Communicator, device: torch.device) -> tuple[frozenset[str], str]:
    """Return the operations, and rank 0's warning if they have not been tried."""
    is_cuda_first = _compare_environments(comm)
    if device.type == "cuda" and _forced() is None and not visible_devices.all_seen(comm, device):
        return frozenset(), ""
    # One byte for success, and one for each operation.
    answer = bytearray(1 + len(OPERATIONS))
    failure: Exception | None = None
    warning = ""
    if comm.rank == 0:
        try:
            table = _known_table(device, is_cuda_first)
            is_told = table is None and runtime.world().rank == 0
            warning = _untried(device) if is_told else ""
            working = _working(table or {})
            answer[:] = bytes([1, *(operation in working for operation in OPERATIONS)])
        except Exception as error:  # the other ranks wait for the answer
            failure = error
    comm.mpi.Bcast((answer, len(answer), MPI.BYTE), 0)
    if not answer[0]:
        raise MpidistError(
            "rank 0 could not find out what MPI does with device memory: see its error"
        ) from failure
    works = zip(OPERATIONS, answer[1:], strict=True)
    return frozenset(operation for operation, does in works if does), warning


@functools.cache
def _warn_once(text: str) -> None:
    # Logged: a warning that is an error would stop this rank alone.
    _log.warning("%s", text)


def _untried(device: torch.device) -> str:
    is_aware, source = library_report.device_support()
    says = f"says that it does ({source})" if is_aware else "does not say whether it does"
    return (
        f'memory of {device.type} devices is staged; run "mpidist doctor" on a GPU node, without a '
        "launcher, in this job's environment and with as many GPUs visible. Whether MPI takes that "
        f"memory has not been tried, and a library that {says} may crash. MPIDIST_CUDA_AWARE=0 or "
        "=1 decides without a trial"
    )


def _compare_environments(comm: Communicator) -> bool:
    """Require the same environment on all ranks; say whether CUDA started first on all of them."""
    every = bytearray(2 * comm.size)
    comm.mpi.Allgather(
        (bytes([_forced_code(), _is_cuda_first()]), 2, MPI.BYTE), (every, 2, MPI.BYTE)
    )
    forced, first = every[::2], every[1::2]
    if len(set(forced)) > 1:
        lines = ", ".join(
            f"{_FORCED_WORDS[code]} on rank {forced.index(code)}" for code in sorted(set(forced))
        )
        raise MpidistError(f"{ENV_CUDA_AWARE} must be the same on all ranks; it is {lines}")
    _forced()
    return all(first)


def _is_cuda_first() -> bool:
    # A world of one, which has no context, asks for jobs, which have one. If unknown: MPI first, as
    # in most scripts that import mpi4py.
    return cuda_context.is_first() is True or runtime.world().size == 1


def _forced_code() -> int:
    return _FORCED.get(os.environ.get(ENV_CUDA_AWARE, ""), _UNREADABLE)


def _forced() -> bool | None:
    code = _forced_code()
    if code == _UNREADABLE:
        raise ValueError(
            f"{ENV_CUDA_AWARE} must be 0 or 1, or unset; got {os.environ[ENV_CUDA_AWARE]!r}"
        )
    return None if code == _UNSET else code == _ON


# --- tables: operation -> "works …" or why not ---


def _device_table(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return _for_all("this rank has no CUDA device")
    table = _known_table(device, _is_cuda_first())
    if _forced() is None and visible_devices.are_known_unseen():
        return _for_all(visible_devices.UNSEEN)
    return table or _for_all("unknown")


def _for_all(text: str) -> dict[str, str]:
    return dict.fromkeys(OPERATIONS, text)


def _working(table: Mapping[str, str]) -> frozenset[str]:
    return frozenset(operation for operation, text in table.items() if text.startswith(WORKS))


def _known_table(device: torch.device, is_cuda_first: bool) -> dict[str, str] | None:
    forced = _forced()
    if forced is not None:
        return _for_all(
            f"{WORKS}, says {ENV_CUDA_AWARE}=1" if forced else f"switched off by {ENV_CUDA_AWARE}=0"
        )
    is_aware, source = library_report.device_support()
    if device.type == "cuda" and is_aware is False:
        name = "ROCm" if torch.version.hip else "CUDA"
        return _for_all(f"the library is not {name}-aware ({source})")
    key = _name(device), is_cuda_first
    if key not in _tables:  # once, because each message needs it
        held = cache.load(_KIND, _key(device, is_cuda_first))
        _tables[key] = held if _is_table(held) else None
    return _tables[key]


def _try_operations(device: torch.device, is_cuda_first: bool) -> dict[str, str]:
    table = capability_trial.try_operations(_name(device), library_name(), cuda_first=is_cuda_first)
    _tables[_name(device), is_cuda_first] = table
    # A job that could not be started gives no information about the library, so the result is not
    # cached.
    is_tried = not any(text.startswith(capability_trial.NOT_TRIED) for text in table.values())
    if is_tried and not cache.store(_KIND, _key(device, is_cuda_first), table):
        _log.warning(
            "what MPI does with memory of %s devices is not kept for later jobs: MPIDIST_CACHE, or "
            "the user's cache folder, cannot be written",
            device.type,
        )
    return table


def _is_table(held: object) -> bool:
    return (
        isinstance(held, dict)
        and tuple(held) == OPERATIONS
        and all(isinstance(text, str) for text in held.values())
    )


def _name(device: torch.device) -> str:
    return f"cuda:{torch.cuda.current_device()}" if str(device) == "cuda" else str(device)


def _key(device: torch.device, is_cuda_first: bool) -> dict[str, object]:
    is_cuda = device.type == "cuda"
    return {
        "trial": VERSION,
        "library": library_name(),
        "file": installed.library_file(),
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        # With one device both ranks of the trial share it.
        "devices": torch.cuda.device_count() if is_cuda else 0,
        "cuda_first": is_cuda_first,
        "driver": library_report.driver_version(),
        "cuda": torch.version.cuda,
        "settings": launcher_env.device_settings(os.environ),
        "search_path": _search_path(installed.library_file()),
    }


def _search_path(library_file: str) -> str:
    """Return LD_LIBRARY_PATH without the library's folder, which Open MPI's launcher puts there."""
    own = os.path.realpath(os.path.dirname(library_file))
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return os.pathsep.join(one for one in folders if one and os.path.realpath(one) != own)
