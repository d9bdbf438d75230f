"""An exception on its way back to the caller: its own type where that can be rebuilt, with the remote traceback as its cause."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from mpidist.errors import FrameError, RemoteError
from mpidist.rpc.allowlist import Allowed
from mpidist.rpc.data_values import error_values, make_error
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


def describe(error: BaseException, as_data: bool = False) -> tuple[str, str, str, Any]:
    """Return an exception as plain data: type name, representation, traceback, and what rebuilds it, None if nothing does.

    Args:
        as_data: For a worker that reads data only: ``data_values.error_values`` rebuild it; else
            its pickle.
    """
    # Whatever the exception's own methods raise, the caller must hear of it.
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as failure:
        text = f"{type(error).__qualname__} (its traceback raised {type(failure).__name__})"
    try:
        is_data = as_data and isinstance(error, Exception)
        content: Any = (
            error_values(error) if is_data else None if as_data else pickle.dumps(error, 5)
        )
    except BaseException:
        content = None
    return type(error).__qualname__, _representation(error), text, content


def rebuild(description: Any, worker: WorkerInfo, allowed: Allowed | None = None) -> BaseException:
    """Return the exception to raise at the caller.

    Args:
        description: What ``describe`` returned on the other side.
        worker: Where that was.
        allowed: The list of this worker, which reads data only if it has one.

    Returns:
        The exception itself; a ``RemoteError`` if it cannot be rebuilt here. Its cause holds the
        remote traceback.

    Raises:
        FrameError: It is no description.
    """
    if (
        type(description) is not tuple
        or len(description) != 4
        or not all(type(part) is str for part in description[:3])
    ):
        raise FrameError(f"{worker} has sent an exception that is none")
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
            f"{reason}. "
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
