"""Public functions of distributed autograd, with torch's names and meanings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.autograd import control_messages
from mpidist.autograd.context import (
    MAX_COUNT,
    MODES,
    WORKER_SHIFT,
    Context,
    thread_state,
    unknown_context,
)
from mpidist.autograd.engine import Engine
from mpidist.dynamo import untraced
from mpidist.rpc import current
from mpidist.rpc.threads import interceptor

Tensor = torch.Tensor
_engine = Engine()
interceptor.register(_engine)


@untraced
class context:
    """A distributed autograd context of the calling thread: ``with context() as context_id:``.

    RPC calls within the context are recorded, on this worker and in the functions that the calls
    run. At its end all workers drop the context's gradients.

    Raises:
        RuntimeError: The thread is within a context, or RPC is not initialised.
    """

    def __enter__(self) -> int:
        """Begin the context; return its id, which is unique in the job."""
        self._context = _new_context()
        return self._context.number

    def __exit__(self, *error: object) -> None:
        """End the context; a one-way message per worker is sent, and none is awaited."""
        thread_state.context = None
        _engine.release(self._context.number)


@untraced
def backward(
    context_id: int, roots: Sequence[Tensor], retain_graph: bool = False, mode: str = "fast"
) -> None:
    """Run the distributed backward pass from some roots.

    Gradients of leaves are summed in the context, on the worker that holds the leaf.

    Blocks: until all workers have completed their parts.

    Args:
        context_id: A context known on this worker.
        roots: Scalar tensors.
        retain_graph: Keep the graph for another pass.
        mode: ``"fast"`` awaits gradients for every tensor sent in the context, as torch does: every
            result must be used. ``"smart"`` awaits only those that the roots depend on, at the
            price of three small messages per worker.

    Raises:
        TypeError: Arguments of a wrong kind.
        RuntimeError: Unknown context; wrong roots; "Error on Node r: …" for an error on any worker,
            with the original as cause.
        RankFailureError: A worker has left.
        CommTimeout: No gradient arrived for the RPC timeout.

    Source: "Distributed Autograd Design", pytorch.org/docs/stable/rpc/distributed_autograd.html
    """
    if (
        type(context_id) is not int
        or not isinstance(roots, (list, tuple))
        or not all(isinstance(r, Tensor) for r in roots)
    ):
        raise TypeError(
            "backward(): incompatible function arguments: expected (context_id: int, roots: list "
            f"of tensors, retain_graph: bool, mode: str); got ({type(context_id).__name__}, "
            f"{type(roots).__name__})"
        )
    if mode not in MODES:
        raise ValueError(f"mode is one of {MODES}; got {mode!r}")
    _engine.initiator.backward(context_id, roots, bool(retain_graph), mode)


@untraced
def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients of a context on this worker, by leaf.

    Raises:
        RuntimeError: Unknown context.
    """
    return _engine.contexts.require(context_id).gradients.all()


# torch's private names, which torch's tests read.


def _new_context() -> Context:
    if _engine.current_context():
        raise RuntimeError("Already have an autograd context id for this thread")
    interceptor.load()
    thread_state.context = created = _engine.contexts.create(current.require().workers.me.id)
    return created


def _release_context(context_id: int) -> None:
    if thread_state.context is not None and thread_state.context.number == context_id:
        thread_state.context = None
    if not _engine.release(context_id):
        raise unknown_context(context_id)


def _current_context() -> Context:
    if not _engine.current_context() or thread_state.context is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with context()`"
        )
    return thread_state.context


def _retrieve_context(context_id: int) -> Context:
    return _engine.contexts.require(context_id)


def _is_valid_context(context_id: int) -> bool:
    return _engine.contexts.find(context_id) is not None


def _get_max_id() -> int:
    return (current.require().workers.me.id << WORKER_SHIFT) + MAX_COUNT


def _get_debug_info() -> dict[str, str]:
    return _engine.debug_info()


def _message_counts() -> dict[str, int]:
    """Return the number of messages that this process has sent, by kind.

    Kinds are ``GRADIENTS`` and the names of ``control_messages.Notice``.
    """
    return dict(control_messages.counts)
