"""Recorder of this process: the ring to which its operations are written.

Opened by the first group after the process has joined a world: the file
``/dev/shm/mpidist-<uid>-<job>/recorder-<rank>`` of the node's memory, where the rank is that among
all processes of the job. What a killed process has left under the name is renamed to
``recorder-<rank>.before`` when the job starts again. ``MPIDIST_RECORDER=0`` turns the recorder off;
a number sets how many entries it holds, and another word is a folder for the files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from mpidist.comm.mpi import job_folder, runtime
from mpidist.comm.recorder.ring import SLOTS, BeginNext, Ring
from mpidist.errors import MpidistError

ENV_RECORDER = "MPIDIST_RECORDER"
_FEWEST, _MOST = 64, 1 << 20  # slots
_DEAD_JOBS = 8  # whose recordings stay

_log = logging.getLogger("mpidist.comm")
_lock = threading.Lock()


class Settings(NamedTuple):
    """What ``MPIDIST_RECORDER`` says.

    Attributes:
        slots: Number of entries; 0 for no recorder.
        folder: Of the files; None for the job's folder in the node's memory.
    """

    slots: int = SLOTS
    folder: Path | None = None


class Off:
    """A recorder that records nothing."""

    path: Path | None = None

    def begin(
        self,
        signature: int,
        sequence: int = 0,
        size_bytes: int = 0,
        peer: int = -1,
        tag: int = 0,
    ) -> int:
        """Return 0."""
        return 0

    def begins(self, signature: int, size_bytes: int, peer: int = -1, tag: int = 0) -> BeginNext:
        """Return a function that returns 0."""
        return self._begin_next

    def end(self, number: int) -> None:
        """Do nothing."""

    def fail(self, number: int) -> None:
        """Do nothing."""

    def signature(
        self,
        kind: str,
        operation: str,
        group: str = "",
        dtype: str = "",
        shape: Sequence[int] = (),
    ) -> int:
        """Return 0."""
        return 0

    def group(self, name: str, key: str, world_ranks: Sequence[int]) -> str:
        """Return the name."""
        return name

    def move(self, world: str, rank: int, size: int) -> None:
        """Do nothing."""

    def name_peer(self, number: int, peer: int) -> None:
        """Do nothing."""

    def ended(self, text: str, error: BaseException | None = None) -> None:
        """Do nothing."""

    @staticmethod
    def _begin_next(sequence: int) -> int:
        return 0


Recorder: TypeAlias = Ring | Off

_recorder: Recorder | None = None
_world: runtime.World | None = None  # whose rank the recorder has


def settings(environ: Mapping[str, str]) -> Settings:
    """Return what ``MPIDIST_RECORDER`` says (pure).

    Raises:
        ValueError: A number of slots that is out of range.
    """
    text = environ.get(ENV_RECORDER, "").strip()
    if not text.isdigit():
        return Settings(folder=Path(text).absolute() if text else None)
    if text != "0" and not _FEWEST <= int(text) <= _MOST:
        raise ValueError(
            f"{ENV_RECORDER} needs a number of entries from {_FEWEST} to {_MOST}, 0 for no "
            f"recorder, or a folder; got {text}"
        )
    return Settings(int(text))


def of_process() -> Recorder:
    """Return this process's recorder, opened at the first call within a world.

    Before, its entries are in memory that ends with the process.

    Raises:
        ValueError: ``MPIDIST_RECORDER`` cannot be read.
    """
    global _recorder, _world
    world = runtime.world() if runtime.is_initialized() else None
    current = _recorder
    if current is not None and (world is None or world is _world):
        return current
    with _lock:
        if _recorder is None or (_world is None and world is not None):
            _recorder = _opened(settings(os.environ), world)
        elif world is not None and world is not _world:
            _recorder.move(world.key, world.rank, world.size)
        _world = world or _world
        return _recorder


@contextlib.contextmanager
def recorded(kind: str, operation: str, tag: int = 0) -> Iterator[None]:
    """Record an operation that the block executes: for those that take a millisecond and more."""
    recorder = of_process()
    number = recorder.begin(recorder.signature(kind, operation), tag=tag)
    try:
        yield
    except BaseException:
        recorder.fail(number)
        raise
    recorder.end(number)


def _record_end(text: str, error: BaseException | None) -> None:
    if _recorder is not None:
        _recorder.ended(text, error)


runtime.before_end(_record_end)


def _opened(chosen: Settings, world: runtime.World | None) -> Recorder:
    if not chosen.slots:
        return Off()
    if world is not None:
        try:
            path = _file(chosen.folder, world)
            return Ring(path, world.start, world.rank, world.size, chosen.slots, world.key)
        except (OSError, MpidistError) as error:
            _log.warning(
                "rank %d: the recorder has no file, so its entries end with the process: %s",
                world.rank,
                error,
            )
    return Ring(None, slots=chosen.slots)


def _file(folder: Path | None, world: runtime.World) -> Path:
    """Return the file of this process, whose name is free."""
    if folder is None:
        job = job_folder.of_job(world.start)
        job.open()
        job_folder.remove_recordings(_DEAD_JOBS)
        folder = job.path
    else:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The rank among all processes of the job: a spare that takes a dead rank's place in the next
    # world has a file of its own.
    path = folder / f"recorder-{runtime.processes_of_job().Get_rank()}"
    with contextlib.suppress(FileNotFoundError):
        path.replace(f"{path}.before")
    return path
