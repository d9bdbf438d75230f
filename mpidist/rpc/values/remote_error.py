"""Exceptions in answers: rebuilt at the caller, with the remote traceback as their cause.

To and from workers that read data only, an exception of Python or of ``mpidist.errors`` is its
name, its arguments and its attributes; one of another class comes as a ``RemoteError``.
"""

from __future__ import annotations

import builtins
import pickle
import traceback
from typing import Any

from mpidist import errors
from mpidist.comm.serialization import data_writer
from mpidist.errors import FrameError, MpidistError, RemoteError
from mpidist.exception_copy import copy_exception
from mpidist.rpc.names.allowlist import Refused
from mpidist.rpc.worker import WorkerInfo

# Exceptions that are made of data. Not of classes that trust their arguments when they become text:
# CPython up to 3.13 reads the object of a UnicodeDecodeError at any start, and a traceback prints
# one mark for each column of a SyntaxError.
_OF_DATA = {
    f"{found.__module__}:{found.__qualname__}": found
    for found in (*vars(builtins).values(), *vars(errors).values(), Refused)
    if isinstance(found, type)
    and issubclass(found, Exception)
    and not issubclass(found, (UnicodeError, SyntaxError))
}
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
        as_data: For a caller that reads data only: not a pickle.

    Returns:
        Type name, representation, traceback, and the content for ``rebuild``: None if the exception
        cannot be encoded.
    """
    # The caller must get an answer even if the exception's own methods raise.
    text = _text(error)
    try:
        content: object = _as_data(error) if as_data else pickle.dumps(error, 5)
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


def rebuild(description: object, worker: WorkerInfo, is_data_only: bool = False) -> BaseException:
    """Return the exception to raise at the caller.

    Args:
        description: The result of ``describe`` on the other worker.
        worker: That worker.
        is_data_only: This worker reads data only.

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
        "this worker reads data only, and exceptions of that class are none"
        if is_data_only
        else "it cannot be pickled"
    )
    if content is not None:
        try:
            is_pickle = type(content) is bytes and not is_data_only
            error = pickle.loads(content) if is_pickle else _of_data(content)
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


def _as_data(error: BaseException) -> object:
    """Return name, arguments and attributes of an exception; None if its class is another."""
    name = f"{type(error).__module__}:{type(error).__qualname__}"
    if _OF_DATA.get(name) is not type(error):
        return None
    # As pickle: with arguments that ``args`` may lack, as an OSError's file.
    reduced: Any = error.__reduce__()
    _, args, *state = reduced
    attributes = {key: value for key, value in (state or [{}])[0].items() if _is_data(value)}
    return name, args if _is_data(args) else (str(error),), attributes


def _is_data(obj: object) -> bool:
    objects: list[Any] = []
    try:
        data_writer.dumps(obj, objects)
    except MpidistError:
        return False
    return not objects


def _of_data(content: Any) -> Exception:
    """Make an exception from ``_as_data``; anything may be raised for other content."""
    name, args, attributes = content
    made = _OF_DATA[name](*args)
    made.__dict__.update(attributes)
    return made


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
