"""Last operations of this process's groups in the form of torch's flight recorder.

torch's own recorder retires an entry of a Python backend when the call is issued. These entries
come from the groups' journals: an operation is *started* until MPI has ended it, and *completed*
from then on. ``torchfrtrace`` reads the files of all ranks and names those that are missing in a
collective, or that called another one.

Every group keeps the last ``TORCH_FR_BUFFER_SIZE`` operations (2000; 0 for none). The watchdog
reads the clock ten times a second, which bounds the times of an entry.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp; torch/distributed/flight_recorder.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from mpidist import torch_version, whole_file
from mpidist.comm.execution.op_status import Journal, Recorded
from mpidist.comm.mpi import library
from mpidist.comm.recorder.collective_begins import Form

FORMAT = "2.10"  # version of the form, as torch 2.13 to 2.15 write it
# torch's variables, the older name second.
_ENV_PREFIX = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ENV_ON_TIMEOUT = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
# torchfrtrace's names of collectives, by those of mpidist.
KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "_all_gather_base",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
}
# NCCL's name of a barrier; also of an operation that torchfrtrace has no name for, and of tensors
# that differ between ranks. The entry's frame has the operation's own name.
OTHER = "all_reduce_barrier"
# torchfrtrace of torch <= 2.14 reads entries of certain libraries alone, among which NCCL is in all
# versions, and no message whose sender is not known.
LIBRARY, HAS_ANY_SOURCE = (
    ("mpidist", True) if torch_version.numbers(torch.__version__) >= (2, 15) else ("nccl", False)
)

Entry = dict[str, Any]
Sizes = list[list[int]]


class Group(Protocol):
    """The part of a process group that its entries describe."""

    name: str
    key: str
    rank: int
    world_ranks: tuple[int, ...]
    timeout_s: float | None
    journal: Journal


def record(
    groups: Iterable[Group], *, include_collectives: bool = True, only_active: bool = False
) -> dict[str, Any]:
    """Return the operations of groups as torch's recorder pickles them.

    Args:
        groups: Groups of this process.
        include_collectives: Return entries; else only the groups.
        only_active: Return the entries of operations that have not ended.
    """
    entries: list[Entry] = []
    config: dict[str, dict[str, str]] = {}
    status: dict[str, dict[str, int]] = {}
    for number, group in enumerate(sorted(groups, key=lambda group: group.key)):
        config[group.key] = config_of(group.key, group.name, group.world_ranks)
        recorded = group.journal.recorded()
        over = [one.sequence for one in recorded if one.is_over]
        started = [one.sequence for one in recorded]
        status[str(number)] = {
            "last_enqueued_collective": max(started, default=-1),
            "last_started_collective": max(started, default=-1),
            "last_completed_collective": max(over, default=-1),
        }
        collectives = [one for one in recorded if not (only_active and one.is_over)]
        entries += [{"pg_id": number, **_collective(group, one)} for one in collectives]
        for pair, entry in _messages(group):
            config.setdefault(pair["name"], pair)
            entries.append({"pg_id": number, **entry})
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return record_of(config, status, entries if include_collectives else [])


def record_of(
    config: dict[str, dict[str, str]], status: dict[str, dict[str, int]], entries: Sequence[Entry]
) -> dict[str, Any]:
    """Return a record of groups, their states by number, and entries, which get numbers."""
    return {
        "version": FORMAT,
        "comm_lib_version": "",
        "pg_config": config,
        "pg_status": status,
        "entries": [
            {"frame_id": place, "record_id": place, "op_id": place, **entry}
            for place, entry in enumerate(entries)
        ],
    }


def path(rank: int, environ: Mapping[str, str], first: int | None = None) -> Path:
    """Return the file of a rank: a prefix and the rank, by torch's variables and default.

    Without ``HOME``, where torch takes ``/tmp``, it is the user's home: torch's analyzer unpickles
    the files, and in ``/tmp`` another user may have made the folder.

    Args:
        first: ``World.first``. The ranks of another world have the same numbers; torchfrtrace reads
            all files of a folder that have the prefix anywhere in their names.
    """
    prefix = next((environ[name] for name in _ENV_PREFIX if environ.get(name)), None)
    if prefix is None:
        cache = environ.get("XDG_CACHE_HOME") or os.path.join(library.home(environ), ".cache")
        prefix = os.path.join(cache, "torch", "comm_lib_trace_rank_")
    if first is not None:
        prefix = f"{prefix[:-1]}-world{first}{prefix[-1]}"
    return Path(f"{prefix}{rank}")


def is_written_on_timeout(environ: Mapping[str, str]) -> bool:
    """Return whether a timeout writes the file; torch's variable, true by default."""
    text = next((environ[name] for name in _ENV_ON_TIMEOUT if environ.get(name)), "1")
    return text.strip().lower() not in ("0", "false", "n", "no", "off")


def write(groups: Iterable[Group], rank: int, first: int | None = None) -> Path:
    """Write the record of groups to this rank's file, which it replaces; return its path.

    Args:
        first: ``World.first``.

    Raises:
        OSError: The file cannot be written.
    """
    file = path(rank, os.environ, first)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = pickle.dumps(record(groups))
    with whole_file.replacing(file) as written:
        written.write(data)
    return file


def how_to_read(file: Path | None, rank: int) -> str:
    """Return the line of a report that names the files of all ranks; empty without a file."""
    if file is None:
        return ""
    prefix = file.name.removesuffix(str(rank))
    return f"  last operations of each rank: torchfrtrace -p {prefix} {file.parent}\n"


def config_of(key: str, name: str, ranks: Sequence[int]) -> dict[str, str]:
    """Return a record's description of a group."""
    return {"name": key, "desc": name, "ranks": str(list(ranks))}


def _collective(group: Group, recorded: Recorded) -> Entry:
    operation, inputs, outputs = recorded.described
    kind = KINDS.get(operation, OTHER)
    if kind in ("broadcast", "reduce"):
        # torch gives each rank the tensor as both, ours has it on the ranks that read or write it.
        inputs = outputs = inputs or outputs
    if kind in ("all_gather", "reduce_scatter") and not _are_alike((*inputs, *outputs)):
        kind = OTHER
    if kind == OTHER:
        inputs = outputs = ()
    is_flat = kind in ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
    return {
        **about(group.key, group.name, kind, operation),
        "collective_seq_id": recorded.sequence,
        "p2p_seq_id": 0,
        "is_p2p": False,
        **_tensors(inputs, outputs, is_flat),
        **times(recorded.begun_ns, recorded.ended_ns, recorded.is_over),
        "timeout_ms": _milliseconds(group.timeout_s),
    }


def _messages(group: Group) -> Iterator[tuple[dict[str, str], Entry]]:
    """Yield the group of two ranks, and the entry, of each message that a thread waits for."""
    seen: Counter[str] = Counter()
    own = group.world_ranks[group.rank]
    now, clock = time.time_ns(), time.monotonic()
    for wait in group.journal.waits():
        if not wait.peers or not isinstance(wait.tensor, torch.Tensor):
            continue
        other = wait.peers[0] if len(wait.peers) == 1 else -1
        is_send, of_group = "send" in wait.operation, (group.key, group.name, group.world_ranks)
        made = message(of_group, wait.operation, is_send, own, other, seen)
        if made is None:
            continue
        pair, entry = made
        form = ((wait.tensor.shape, wait.tensor.dtype),)
        yield (
            pair,
            {
                **entry,
                **_tensors(form, form, is_flat=False),
                **times(now - int((clock - wait.start) * 1e9), None, is_over=False),
                "timeout_ms": _milliseconds(group.timeout_s),
            },
        )


def message(
    group: tuple[str, str, Sequence[int]],
    operation: str,
    is_send: bool,
    own: int,
    other: int,
    seen: Counter[str],
) -> tuple[dict[str, str], Entry] | None:
    """Return the group of a message's two ranks and what its entry says; None if torch reads none.

    Args:
        group: Key, name and world ranks of the message's group.
        own, other: World ranks; the other is -1 for any.
        seen: Number of messages so far, by the key of the two ranks' group.
    """
    key, name, members = group
    is_any = other < 0
    if is_any and not HAS_ANY_SOURCE:
        return None
    ranks = members if is_any else tuple(sorted((own, other)))
    # Of the ranks in the group that the entry names.
    here, there = ranks.index(own), "?" if is_any else ranks.index(other)
    kind = f"send {here}->{there}" if is_send else f"recv {here}<-{there}"
    pair = f"{key}:{'any' if is_any else ','.join(map(str, ranks))}"
    seen[pair] += 1
    return config_of(pair, name, ranks), {
        **about(pair, name, kind, operation),
        "collective_seq_id": seen[pair],
        "p2p_seq_id": seen[pair],
        "is_p2p": True,
    }


def about(key: str, name: str, kind: str, operation: str) -> Entry:
    """Return what an entry says of its group, and of the operation by torch's name and ours."""
    return {
        "process_group": (key, name),
        "profiling_name": f"{LIBRARY}:{kind}",
        "frames": [{"name": f"mpidist {operation}", "filename": "", "line": 0}],
    }


def _tensors(inputs: Sequence[Form], outputs: Sequence[Form], is_flat: bool) -> Entry:
    return {
        "input_sizes": _sizes(inputs, is_flat),
        "input_dtypes": _dtypes(inputs),
        "output_sizes": _sizes(outputs, is_flat),
        "output_dtypes": _dtypes(outputs),
    }


def times(begun_ns: int, ended_ns: int | None, is_over: bool) -> Entry:
    """Return an entry's state and times, in ns since the epoch."""
    return {
        "state": "completed" if is_over else "started",
        "retired": is_over,
        "time_created_ns": begun_ns,
        "time_discovered_started_ns": begun_ns,
        "time_discovered_completed_ns": ended_ns,
    }


def _sizes(forms: Sequence[Form], is_flat: bool) -> Sizes:
    """Return the shapes, or all elements as one tensor; of no tensor one empty shape."""
    if is_flat and len(forms) > 1:
        return [[sum(shape.numel() for shape, _ in forms)]]
    return [list(shape) for shape, _ in forms] or [[]]


def _dtypes(forms: Sequence[Form]) -> list[str]:
    return sorted({str(dtype).removeprefix("torch.") for _, dtype in forms})


def _are_alike(forms: Sequence[Form]) -> bool:
    return len({shape.numel() for shape, _ in forms}) <= 1


def _milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1000)
