"""An exception on its way back to the caller: its own type where that can be rebuilt, with the remote traceback as its cause."""

from __future__ import annotations

import io
import pickle
import traceback
from typing import Any

from mpidist.errors import RemoteError
from mpidist.rpc.worker import WorkerInfo


class RemoteTraceback(Exception):
    """Where an exception was raised: the cause of the one that the caller gets.

    Attributes:
        worker: The worker's name.
        rank: Its rank.
    """

    def __init__(self, text: str, worker: str, rank: int) -> None:
        super().__init__(text)
        self.worker = worker
        self.rank = rank

    def __str__(self) -> str:
        return f'\n"""\non worker "{self.worker}" (rank {self.rank}):\n{self.args[0]}"""'


def described(error: BaseException) -> tuple[str, str, str, bytes | None]:
    """Return an exception as plain data: type name, representation, traceback, and its pickle if it has one."""
    # Whatever the exception's own methods raise, the caller must hear of it.
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as failure:
        text = f"{type(error).__qualname__} (its traceback raised {type(failure).__name__})"
    try:
        pickled: bytes | None = pickle.dumps(error, 5)
    except BaseException:
        pickled = None
    return type(error).__qualname__, _representation(error), text, pickled


def rebuilt(description: Any, worker: WorkerInfo, unpickler: Any = pickle.Unpickler) -> BaseException:
    """Return the exception to raise at the caller.

    Args:
        description: What ``described`` returned on the other side.
        worker: Where that was.
        unpickler: The class that reads it.

    Returns:
        The exception itself; a ``RemoteError`` if it cannot be rebuilt here. Its cause holds the remote traceback.
    """
    type_name, representation, text, pickled = description
    error: BaseException | None = None
    reason = "it cannot be pickled"
    if pickled is not None:
        try:
            error = unpickler(io.BytesIO(pickled)).load()
        except BaseException as failure:
            reason = f"rebuilding it raised {failure!r}"
    if error is not None and not isinstance(error, Exception):
        reason = "an answer must not interrupt or end this program"
    if not isinstance(error, Exception):
        error = RemoteError(
            f"{worker.name} (rank {worker.id}) raised {type_name}, which cannot be raised here: {reason}. "
            f"Original exception on remote side was: {representation}",
            worker.id,
            type_name,
        )
    error.__cause__ = RemoteTraceback(text, worker.name, worker.id)
    return error


def _representation(error: BaseException) -> str:
    try:
        return f"{type(error).__qualname__}: {error}"
    except BaseException as failure:
        return f"{type(error).__qualname__} (its text raised {type(failure).__name__})"
