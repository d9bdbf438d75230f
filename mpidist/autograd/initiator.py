"""Initiator of backward passes: checks the roots, starts a pass and waits for its end.

A pass begins at once in FAST mode, after a survey in SMART mode: the survey asks every worker of
the context which of its receives each of its sends reaches (``smart``). With all answers the
initiator computes the sends that the roots reach, and has each worker await the gradients of these
sends alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mpidist.autograd.context import SMART, Context, Contexts, unknown_context
from mpidist.autograd.control_messages import Notice, notify, notify_all
from mpidist.autograd.dependencies import ROOTS, Plan
from mpidist.autograd.parts import Parts, plan_of
from mpidist.autograd.passes import Pass
from mpidist.autograd.recording import Edge, Tensor
from mpidist.autograd.smart import Summary, Survey, closure, summary
from mpidist.comm.recorder import recorder
from mpidist.errors import FrameError, MpidistError, RankFailureError
from mpidist.rpc import current
from mpidist.rpc.agent import Agent
from mpidist.rpc.values import remote_error
from mpidist.rpc.worker import Workers


def edges_of(roots: Sequence[Tensor]) -> list[Edge]:
    """Return the graph edges of the roots.

    Raises:
        RuntimeError: No roots; a root that does not require grad, has several elements, or has no
            ``grad_fn``. The messages are torch's.
    """
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    edges: list[Edge] = []
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(
                f"root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar"
            )
        if root.grad_fn is None:
            raise RuntimeError("root does not have a valid gradient function.")
        edges.append((root.grad_fn, root.output_nr))
    return edges


class Start:
    """The initiator's own part of a pass, ready to begin.

    Args:
        parts: The parts of this worker.
        running: The pass.
        context: Its context.
        retain: Whether the graph is kept.
        plan: The plan from the roots and all sends.
        roots: Scalar tensors.
    """

    def __init__(
        self,
        parts: Parts,
        running: Pass,
        context: Context,
        retain: bool,
        plan: Plan,
        roots: Sequence[Tensor],
    ) -> None:
        self._parts = parts
        self._pass = running
        self._context = context
        self._retain = retain
        self._plan = plan
        self._roots = roots

    def begin(self, awaited: Iterable[int] | None = None) -> None:
        """Begin the part and deliver the gradients of the roots.

        Args:
            awaited: Keys of the sources that get gradients; None for all.
        """
        part = self._parts.begin(self._context, self._pass.key, self._retain, self._plan, awaited)
        if part is None:
            self._pass.fail(unknown_context(self._context.number))
        else:
            self._parts.deliver(part, ROOTS, [torch.ones_like(root) for root in self._roots])


class SmartStart(Start):
    """The same in SMART mode; the arguments are those of ``Start``.

    Attributes:
        survey: The answers so far; the pass has it, too.
    """

    def __init__(
        self,
        parts: Parts,
        running: Pass,
        context: Context,
        retain: bool,
        plan: Plan,
        roots: Sequence[Tensor],
    ) -> None:
        super().__init__(parts, running, context, retain, plan, roots)
        own = summary(plan, context.receives)
        self._first = own[ROOTS]
        self.survey = running.survey = Survey(running.me, own, context.peers() - {running.me})

    def ask(self) -> None:
        """Ask the workers that are new to the survey; begin once all have answered."""
        for worker in self.survey.next():
            notify(worker, Notice.ASK, self._pass.context, self._pass.key)
        if self.survey.is_complete():
            self._begin_everywhere()

    def add_summary(self, worker: int, found: Summary, peers: Sequence[int]) -> None:
        """Record a worker's answer, then ask further workers or begin.

        Raises:
            FrameError: The answer names workers that do not share the context.
        """
        strangers = {source for hops in found.values() for _, source in hops} - set(peers)
        if strangers:
            raise FrameError(
                f"rank {worker} has tensors of ranks {sorted(strangers)}, which are none of its "
                "peers"
            )
        if self.survey.add(worker, found, peers):
            self.ask()

    def _begin_everywhere(self) -> None:
        running = self._pass
        reached = closure(self.survey.summaries, self._first)
        running.expect(worker for worker, sends in reached.items() if sends)
        for worker in self.survey.asked - {running.me}:
            sends = tuple(reached.get(worker, ()))
            notify(worker, Notice.AWAIT, self._context.number, running.key, self._retain, sends)
        self.begin([ROOTS, *reached.get(running.me, ())])


class Initiator:
    """The running passes that began on this worker.

    Args:
        contexts: Contexts of this worker.
    """

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._passes: dict[int, Pass] = {}
        self._surveying: dict[int, SmartStart] = {}  # by pass, in SMART mode
        self.parts = Parts(contexts, self.complete_part, self._fail)

    def backward(self, number: int, roots: Sequence[Tensor], retain: bool, mode: str) -> None:
        """See ``mpidist.autograd.backward``."""
        agent = current.require()
        context = self._contexts.require(number)
        edges = edges_of(roots)
        me = agent.workers.me.id
        key = self._contexts.make_id(me) | (SMART if mode == "smart" else 0)
        running = self._passes[key] = Pass(key, number, me)
        with recorder.recorded("backward", "backward", key):
            try:
                start = (self.parts, running, context, retain, plan_of(context, edges), roots)
                if mode == "smart":
                    smart = self._surveying[key] = SmartStart(*start)
                    smart.ask()
                else:
                    Start(*start).begin()
                running.wait(
                    agent.polling.wait,
                    agent.calls.rpc_timeout,
                    self._probe,
                    [info.name for info in agent.workers.infos],
                )
            except BaseException:
                self.parts.stop(context, key)
                if running.survey is not None:
                    notify_all(running.survey.asked - {me}, Notice.STOP, number, key)
                raise
            finally:
                del self._passes[key]
                self._surveying.pop(key, None)

    def add_summary(
        self, worker: int, number: int, key: int, found: Summary, peers: Sequence[int]
    ) -> None:
        """Record a worker's answer to the survey of a pass.

        Raises:
            FrameError: The worker was not asked, or has answered before.
        """
        running = self._running(number, key)
        if running is None or running.error is not None:
            return
        smart = self._surveying.get(key)
        if smart is None or not smart.survey.expects(worker):
            raise FrameError(
                f"rank {worker} answers a survey of pass {key} that it was not asked for, or again"
            )
        running.progress()
        try:
            smart.add_summary(worker, found, peers)
        except Exception as error:
            running.fail(error)

    # Reports of the workers.

    def _running(self, number: int, key: int) -> Pass | None:
        """Return a pass of a context, or None if it has ended.

        Raises:
            FrameError: The pass belongs to another context.
        """
        running = self._passes.get(key)
        if running is not None and running.context != number:
            raise FrameError(f"pass {key} is not of context {number}")
        return running

    def refuse(self, number: int, key: int, error: MpidistError) -> None:
        """Fail a pass because of a malformed message."""
        if self._running(number, key) is not None:
            self._fail(key, error)

    def complete_part(self, worker: int, number: int, key: int, sent_to: Iterable[int]) -> None:
        """Record that a worker's part is complete."""
        running = self._running(number, key)
        if running is not None:
            running.complete(worker, sent_to)
            self._require_living(running)

    def _require_living(self, running: Pass) -> None:
        """Fail a pass if a worker left before its part was reported to the initiator."""
        agent = current.agent
        if agent is not None and agent.workers.left:
            for rank in agent.workers.left & running.members():
                running.fail(worker_lost(agent.workers, rank))

    def _fail(self, key: int, error: BaseException) -> None:
        """Fail a pass because of an error on this worker."""
        running = self._passes.get(key)
        if running is None:
            return
        # An interrupt of the user is raised as it is.
        if not isinstance(error, Exception):
            running.fail(error)
        else:
            running.fail(_error_on(running.me, error))

    def fail_part(
        self, agent: Agent, worker: int, number: int, key: int, description: object
    ) -> None:
        """Fail a pass because of an error on another worker."""
        running = self._running(number, key)
        if running is None:
            return
        try:
            error = remote_error.rebuild(
                description, agent.workers.infos[worker], agent.allowed is not None
            )
        except Exception as failure:
            error = FrameError(f"rank {worker} reports an error that cannot be read: {failure}")
        running.fail(_error_on(worker, error))

    def add_report(
        self,
        worker: int,
        number: int,
        key: int,
        idle_s: float,
        missing: list[str],
        sent_to: Iterable[int],
    ) -> None:
        """Record a worker's answer to ``Notice.PROBE``.

        Raises:
            FrameError: The worker was not asked.
        """
        running = self._running(number, key)
        if running is not None:
            if worker not in running.mentioned:
                raise FrameError(f"rank {worker} reports about pass {key}, in which it has no part")
            running.report(worker, idle_s, missing, sent_to)

    def _probe(self, running: Pass) -> tuple[float, list[str]]:
        idle_s, missing, sent_to = self.parts.report(running.context, running.key)
        running.expect(sent_to)
        for worker in running.members():
            notify(worker, Notice.PROBE, running.context, running.key)
        return idle_s, missing

    def fail_all(
        self, error: BaseException, context: int | None = None, worker: int | None = None
    ) -> None:
        """Fail all passes, or only those of a context, or those in which a worker has a part."""
        for running in list(self._passes.values()):
            if (context is None or running.context == context) and (
                worker is None or running.involves(worker)
            ):
                running.fail(error)


def worker_lost(workers: Workers, rank: int) -> RankFailureError:
    """Return the error for a pass that needs a worker which has left."""
    return RankFailureError(
        f"a backward pass needs a worker that is lost: {workers.loss_of(rank)}",
        (workers.world_ranks[rank],),
    )


def _error_on(worker: int, error: BaseException) -> RuntimeError:
    text = f"Error on Node {worker}: {error}"
    if not isinstance(error, RankFailureError):
        wrapped = RuntimeError(text)
    elif error.__cause__ is None:
        return error
    else:
        wrapped = RankFailureError(text, error.ranks)
    wrapped.__cause__ = error
    return wrapped
