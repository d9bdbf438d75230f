"""Concurrent calls of one operation on several workers, and all their errors in one exception."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from mpidist.errors import WorkerErrors
from mpidist.rpc import api
from mpidist.rpc.threads.call import RpcFuture
from mpidist.rpc.worker import WorkerInfo

Calls = Mapping[WorkerInfo, tuple[object, ...]]
Result = TypeVar("Result")


def start_all(
    function: Callable[..., Result], calls: Calls
) -> tuple[dict[WorkerInfo, Result], dict[WorkerInfo, BaseException]]:
    """Call a function on workers at the same time.

    Blocks: until the last worker has answered or failed.

    Args:
        function: The function to run on the workers.
        calls: The arguments, by worker.

    Returns:
        Results and errors, by worker.
    """
    results: dict[WorkerInfo, Result] = {}
    errors: dict[WorkerInfo, BaseException] = {}
    futures: dict[WorkerInfo, RpcFuture] = {}
    for worker, arguments in calls.items():
        try:
            futures[worker] = api.rpc_async(worker, function, args=arguments)
        except Exception as error:  # the call cannot be sent
            errors[worker] = error
    for worker, future in futures.items():
        try:
            results[worker] = future.wait()
        except Exception as error:
            errors[worker] = error
    return results, errors


def call_all(
    operation: str, function: Callable[..., Result], calls: Calls
) -> dict[WorkerInfo, Result]:
    """Call a function on workers at the same time; return the results.

    Blocks: until the last worker has answered or failed.

    Raises:
        WorkerErrors: Some workers raised; holds their errors.
    """
    results, errors = start_all(function, calls)
    raise_for(operation, errors, len(calls))
    return results


def raise_for(operation: str, errors: Mapping[WorkerInfo, BaseException], called: int) -> None:
    """Raise one exception for the errors of workers, if any.

    Args:
        operation: The name in the message.
        errors: By worker.
        called: The number of all workers called.
    """
    if not errors:
        return
    texts = (
        f"{worker.name} (rank {worker.id}): {type(error).__name__}: {error}"
        for worker, error in errors.items()
    )
    text = f"{operation} failed on {len(errors)} of {called} worker(s): {'; '.join(texts)}"
    raise WorkerErrors(text, {worker.name: error for worker, error in errors.items()}) from next(
        iter(errors.values())
    )
