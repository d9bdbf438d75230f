"""Exceptions of mpidist; a wrong argument raises a plain ``ValueError`` or ``TypeError``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ONE_CALL = 2  # the caller and the callee, whom the text names


class MpidistError(RuntimeError):
    """Base class of the library's exceptions.

    Attributes:
        calls: Names of the workers whose nested RPC calls the error broke, the outermost caller
            first, and what has become of the last one: ``("w0", "w1", "w2, dead")``. Empty for
            other errors.
    """

    calls: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = super().__str__()
        if len(self.calls) <= _ONE_CALL:
            return text
        return f"{text} (calls: {' -> '.join(self.calls)})"


class LaunchError(MpidistError):
    """The job was started in a way in which MPI cannot connect its ranks."""


class GroupError(MpidistError):
    """A process group cannot be used: it is closed, or the caller is not a member."""


class DisagreementError(MpidistError):
    """Ranks entered a collective with different arguments; raised on all ranks.

    The operations, shapes, dtypes or plans differ.
    """


class CommTimeout(MpidistError, TimeoutError):
    """An operation did not finish within its time."""


class RankFailureError(MpidistError):
    """Ranks of the job died or left.

    Attributes:
        ranks: World ranks that are known to have failed; empty if MPI does not report them.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class FrameError(MpidistError):
    """Bytes that are no message of this library: truncated, too long, or of an unknown version."""


_LONG_PLACE = 100  # characters


class NotPlainData(MpidistError, TypeError):
    """An object, or an item in it, cannot be written as data.

    Attributes:
        place: Position in the object: ``[1]['net']``; empty for the object itself.
        reason: A clause about the item.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place

    @classmethod
    def of(cls, obj: object) -> NotPlainData:
        """Return the error for an object."""
        kind = type(obj)
        name = (
            kind.__qualname__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        text = (
            repr(obj)
            if isinstance(obj, type) or (callable(obj) and hasattr(obj, "__qualname__"))
            else f"a {name}"
        )
        return cls(f"{text} is no plain data")

    def within(self, step: str) -> NotPlainData:
        """Return the error with ``step``, the index in the container, before its place."""
        place = self.place if len(self.place) < _LONG_PLACE else "[...]"
        return NotPlainData(self.reason, step + place)


class RemoteError(MpidistError):
    """A call failed on another worker, and its exception cannot be rebuilt here.

    Attributes:
        rank: The worker's rank.
        type_name: The name of the exception's type on that worker.
    """

    def __init__(self, message: str, rank: int = -1, type_name: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.type_name = type_name


class WorkerErrors(MpidistError):
    """One operation failed on some workers, or on all.

    The text has each worker's error; the cause is the first error.

    Attributes:
        errors: By the worker's name.
    """

    def __init__(self, message: str, errors: Mapping[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.errors = dict(errors or {})


class RRefError(MpidistError):
    """A remote reference cannot be used.

    Its creation failed, it was deleted, or this worker is not its owner.
    """


class CheckpointError(MpidistError):
    """A checkpoint cannot be written or read; raised on all ranks.

    It is damaged, truncated or of another model.
    """


class ReplicaError(MpidistError):
    """Ranks hold parameters of different bits that are to be the same; raised on all ranks.

    Attributes:
        ranks: World ranks outside the majority; all compared ones if there is none.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RecordingError(MpidistError):
    """A file is no recording of operations, of another version, or cut."""


class KernelError(MpidistError):
    """A CUDA kernel could not be found or compiled."""
