"""Start of a backward pass at its initiator: at once in FAST mode, after a survey in SMART mode.

The survey asks every worker of the context which of its receives each of its sends reaches
(``smart``). With all answers the initiator computes the sends that the roots reach, and has each
worker await the gradients of these sends alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mpidist.autograd.context import Context, unknown_context
from mpidist.autograd.control_messages import Notice, notify
from mpidist.autograd.dependencies import ROOTS, Plan
from mpidist.autograd.parts import Parts
from mpidist.autograd.passes import Pass
from mpidist.autograd.recording import Tensor
from mpidist.autograd.smart import Summary, Survey, closure, summary
from mpidist.errors import FrameError


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
