"""Exceptions in answers: rebuilt at the caller, with the remote traceback as their cause."""

from __future__ import annotations

import pickle
import traceback

from mpidist.errors import FrameError, MpidistError, RemoteError
from mpidist.exception_copy import copy_exception
from mpidist.rpc.names.allowlist import Allowed
from mpidist.rpc.values.data_values import error_values, make_error
from mpidist.rpc.worker import WorkerInfo

_MOST_CALLS = 32  # in a chain; of a longer one both ends


class RemoteTraceback(Exception):
    """Remote traceback: the cause of the exception that is raised at the caller.

    Attributes:
        worker: The name of the worker that has raised the exception.
        rank: The rank of that worker.
    """

    def __init__(self, text: str, worker: str, rank: int) -> None:
        super().__init__(text)
        self.worker = worker
        self.rank = rank

    def __str__(self) -> str:
        return f'\n"""\non worker "{self.worker}" (rank {self.rank}):\n{self.args[0]}"""'


def describe(error: BaseException, as_data: bool = False) -> tuple[str, str, str, object]:
    """Return an exception as plain data.

    Args:
        error: The exception.
        as_data: For a caller that reads data only: use ``data_values.error_values``, not a pickle.

    Returns:
        Type name, representation, traceback, and the content for ``rebuild``: None if the exception
        cannot be encoded.
    """
    # The caller must get an answer even if the exception's own methods raise.
    text = _text(error)
    try:
        is_data = as_data and isinstance(error, Exception)
        content: object = (
            error_values(error) if is_data else None if as_data else pickle.dumps(error, 5)
        )
    except BaseException:
        content = None
    return type(error).__qualname__, _representation(error), text, content


def without_frames(error: Exception, worker: WorkerInfo) -> BaseException:
    """Return an exception to keep, with its traceback as text in its cause.

    Its frames would keep alive the arguments of the function that has raised it. A thread that
    waited for something else may have run the function, and theirs too.

    Args:
        error: The exception that a function has raised.
        worker: This worker.
    """
    made = copy_exception(error, 1)
    if made is not error:
        made.__cause__ = RemoteTraceback(_text(error), worker.name, worker.id)
    return made


def rebuild(
    description: object, worker: WorkerInfo, allowed: Allowed | None = None
) -> BaseException:
    """Return the exception to raise at the caller.

    Args:
        description: The result of ``describe`` on the other worker.
        worker: That worker.
        allowed: The list of this worker; None if it reads pickles.

    Returns:
        The exception, or a ``RemoteError`` if the exception cannot be rebuilt here; its cause is a
        ``RemoteTraceback``.

    Raises:
        FrameError: The description is invalid.
    """
    if (
        type(description) is not tuple
        or len(description) != 4
        or not all(type(part) is str for part in description[:3])
    ):
        raise FrameError(f"{worker} has sent an invalid description of an exception")
    type_name, representation, text, content = description
    error: BaseException | None = None
    reason = (
        "it cannot be pickled"
        if allowed is None
        else "an answer must not interrupt or end this program"
    )
    if content is not None:
        try:
            error = pickle.loads(content) if allowed is None else make_error(content, allowed)
        except BaseException as failure:
            reason = f"rebuilding it raised {failure!r}"
    if error is not None and not isinstance(error, Exception):
        reason = "an answer must not interrupt or end this program"
    if not isinstance(error, Exception):
        error = RemoteError(
            f"{worker.name} (rank {worker.id}) raised {type_name}, which cannot be raised here: "
            f"{reason}. Original exception on remote side was: {representation}",
            worker.id,
            type_name,
        )
    error.__cause__ = RemoteTraceback(text, worker.name, worker.id)
    return error


def called_by(caller: WorkerInfo, error: BaseException, callee: WorkerInfo) -> BaseException:
    """Put a caller in front of the chain of calls that an error has broken.

    Args:
        caller: This worker.
        error: The exception that a call has raised on ``callee``, rebuilt here.
    """
    if isinstance(error, MpidistError) and "calls" in error.__dict__:
        # Another worker has sent it.
        calls = error.__dict__["calls"]
        is_chain = type(calls) is tuple and calls[:1] == (callee.name,)
        if is_chain and all(type(name) is str for name in calls):
            error.calls = (caller.name, *calls)
            if len(error.calls) > _MOST_CALLS:
                half = _MOST_CALLS // 2
                error.calls = (*error.calls[:half], "...", *error.calls[-half + 1 :])
        else:
            error.calls = ()
    return error


def is_from_another_worker(error: BaseException) -> bool:
    """Return whether an exception came with an answer, so that its worker has logged it."""
    return isinstance(error.__cause__, RemoteTraceback)


def _text(error: BaseException) -> str:
    cause = error.__cause__
    if error.__traceback__ is None and isinstance(cause, RemoteTraceback):
        return str(cause.args[0])
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as failure:
        return f"{type(error).__qualname__} (its traceback raised {type(failure).__name__})"


def _representation(error: BaseException) -> str:
    try:
        return f"{type(error).__qualname__}: {error}"
    except BaseException as failure:
        return f"{type(error).__qualname__} (its text raised {type(failure).__name__})"
