"""Engine of distributed autograd: the ``Interceptor`` that ``rpc`` calls for each message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from mpidist.autograd import checks, recording
from mpidist.autograd.context import (
    WORKER_SHIFT,
    Context,
    Contexts,
    Within,
    thread_state,
    unknown_context,
)
from mpidist.autograd.control_messages import GRADIENT_KINDS, Notice, notify_all
from mpidist.autograd.initiator import Initiator, worker_lost
from mpidist.autograd.recording import Receive, Send, Tensor
from mpidist.errors import FrameError, MpidistError
from mpidist.rpc import current
from mpidist.rpc.threads.pool import Task


class Engine:
    """Records tensors of RPC messages, and dispatches gradients and notices."""

    def __init__(self) -> None:
        self.contexts = Contexts()
        self.initiator = Initiator(self.contexts)
        self._parts = self.initiator.parts

    # Messages within contexts.

    def current_context(self) -> int:
        """See ``Interceptor``."""
        context = thread_state.context
        return context.number if context is not None and not context.is_released else 0

    def request_arrived(self, context: int, source: int) -> None:
        """See ``Interceptor``.

        Raises:
            FrameError: No worker can have made the context.
        """
        agent = current.agent
        if agent is not None and context >> WORKER_SHIFT >= len(agent.workers.infos):
            raise FrameError(
                f"rank {source} calls within context {context}, which no worker can have made"
            )
        self.contexts.request_arrived(_own_rank(), context, source)

    def leaving(self, context: int, to: int, tensors: Sequence[Tensor], is_answer: bool) -> int:
        """See ``Interceptor``."""
        found: Context | None
        if is_answer:
            found = self.contexts.find(context)
        else:
            # The context may have ended meanwhile: the clean-up is sent when this handler ends.
            found = thread_state.context
            if found is not None and found.number == context:
                found.callees.add(to)
        if found is None:
            return 0
        sent = [tensor for tensor in tensors if tensor.requires_grad]
        if not sent:
            return 0
        number = self.contexts.make_id(_own_rank())
        found.sends[number] = Send(to, is_answer, sent)
        return number

    def arriving(
        self, context: int, source: int, number: int, tensors: list[Tensor], is_answer: bool
    ) -> list[Tensor]:
        """See ``Interceptor``."""
        found = self.contexts.find(context)
        received_tensors = [tensor for tensor in tensors if tensor.requires_grad]
        if found is None or not received_tensors:
            return tensors
        outputs = recording.received(received_tensors)
        node = outputs[0].grad_fn
        assert node is not None
        found.receives[node] = Receive(number, source, is_answer, len(outputs))
        if len(outputs) == len(tensors):
            return list(outputs)
        following = iter(outputs)
        return [next(following) if tensor.requires_grad else tensor for tensor in tensors]

    def entering(self, context: int, source: int, is_answer: bool) -> AbstractContextManager[None]:
        """See ``Interceptor``."""
        return Within(self.contexts.find(context), _own_rank())

    # Messages of the engine.

    def handle(self, source: int, kind: int, context: int, obj: object) -> None:
        """See ``Interceptor``; runs a pass from an owned reference's value for another worker."""
        reference, number, retain_graph, mode = checks.request(
            obj, len(current.require().workers.infos)
        )
        reference.backward(number, retain_graph, mode)

    def handle_one_way(self, source: int, kind: int, context: int, obj: object) -> Task | None:
        """See ``Interceptor``.

        Raises:
            FrameError: The message is malformed, or its sender may not send it.
        """
        if kind in GRADIENT_KINDS:
            return _task(self._parts.receive_gradients, source, obj)
        agent = current.require()
        count, me = len(agent.workers.infos), agent.workers.me.id
        what, number, key, rest = checks.head(obj, count)
        found = self.contexts.find(number)
        checks.sender(what, source, me, number, key, found)
        try:
            checks.body(what, rest, count)
        except FrameError as error:
            # Fail the pass now: it would otherwise wait for a valid message of the sender.
            failure = FrameError(f"rank {source} sent {error}")
            if checks.initiator_of(key) == me:
                self.initiator.refuse(number, key, failure)
            else:
                self._parts.report_failure(number, key, failure)
            raise
        if what == Notice.DONE:
            self.initiator.complete_part(source, number, key, *rest)
        elif what == Notice.FAILED:
            return _task(self.initiator.fail_part, agent, source, number, key, *rest)
        elif what == Notice.STOP:
            if found is not None:
                self._parts.stop(found, key)
        elif what == Notice.ASK:
            return _task(self._parts.answer_survey, number, key)
        elif what == Notice.SUMMARY:
            return _task(self.initiator.add_summary, source, number, key, *rest)
        elif what == Notice.AWAIT:
            return _task(self._parts.begin_awaited, number, key, *rest)
        elif what == Notice.PROBE:
            idle_s, missing, sent_to = self._parts.report(number, key)
            notify_all([source], Notice.REPORT, number, key, idle_s, missing, tuple(sent_to))
        elif what == Notice.REPORT:
            self.initiator.add_report(source, number, key, *rest)
        elif what == Notice.CLEANUP:
            self.release(number)
        elif what == Notice.ADOPT:
            self.contexts.adopt(number, source)
        return None

    def worker_left(self, rank: int) -> None:
        """See ``Interceptor``."""
        agent = current.agent
        if agent is None:
            return
        workers = agent.workers
        error = worker_lost(workers, rank)
        self.initiator.fail_all(error, worker=rank)
        self._parts.worker_left(rank, error)
        for context in self.contexts.worker_left(rank, workers.me.id):
            self._parts.stop_all(context)

    def stopped(self) -> None:
        """See ``Interceptor``."""
        self.initiator.fail_all(
            MpidistError("RPC was shut down on this worker during a backward pass")
        )
        self.contexts.clear()

    # Calls of users.

    def backward(self, context: int, root: Tensor, retain_graph: bool, mode: str) -> None:
        """See ``Interceptor``."""
        self.initiator.backward(context, [root], retain_graph, mode)

    def release(self, number: int) -> bool:
        """End a context on this worker and its callees; return whether this worker had it."""
        context = self.contexts.release(number, _own_rank())
        if context is None:
            return False
        self._parts.stop_all(context)
        self.initiator.fail_all(unknown_context(number), context=number)
        return True

    def debug_info(self) -> dict[str, str]:
        """See ``Interceptor``; torch's names."""
        return {
            "num_current_backward_passes": str(
                sum(len(context.parts) for context in self.contexts.values())
            ),
            "num_autograd_contexts": str(len(self.contexts)),
        }


def _own_rank() -> int:
    agent = current.agent
    return agent.workers.me.id if agent is not None else -1


def _task(function: Callable[..., None], *args: object) -> Task:
    return Task(partial(function, *args))
