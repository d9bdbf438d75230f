"""Attacker: sends any bytes, as a message of any kind, below the public calls."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mpidist.rpc as rpc
from mpidist.comm.mpi.library import MPI
from mpidist.rpc import current
from mpidist.rpc.calls import engine_messages
from mpidist.rpc.message import COUNT, Kind
from mpidist.rpc.threads.call import Call
from mpidist.rpc.values import codec
from tests.rpc.attacks import victim

WAIT_S = 5.0  # for an answer
_LOG_S = 1.5  # for a line in the log
_COUNTED = frozenset({Kind.RREF_FORK, Kind.RREF_USER_DELETE}) | engine_messages.KINDS
_numbers = itertools.count(1 << 40)  # of calls; the agent's own begin with 1


class Accepted(AssertionError):
    """An attack got an answer that is no refusal."""


class Seen(NamedTuple):
    """State that the victim reports.

    Attributes:
        fired: The events of the canary.
        entries: The list.
        log: The texts logged since the last report.
    """

    fired: list[str]
    entries: list[str]
    log: list[str]


class Attacker:
    """Messages from this process to one worker.

    Args:
        to: Its rank.
    """

    def __init__(self, to: int) -> None:
        self.agent = current.require()
        self.to = to

    def send(
        self,
        kind: int,
        header: bytes = b"",
        *,
        flags: int = 0,
        parts: Sequence[Any] = (),
        sequence: int = 0,
        context: int = 0,
    ) -> None:
        """Send a one-way message."""
        if kind in _COUNTED:
            # As an honest sender counts them: else the end would wait for messages that were never
            # sent.
            self.agent.wire.one_way_sent += 1
        self.agent.dispatcher._transport.send(
            self.to, kind, sequence, context, flags, header, parts
        )

    def request(
        self,
        kind: int,
        header: bytes = b"",
        *,
        flags: int = 0,
        parts: Sequence[Any] = (),
        context: int = 0,
    ) -> Any:
        """Send a request and return what its answer holds, or raise it."""
        calls = self.agent.calls
        call = Call(self.to, "an attack", WAIT_S)
        call.sequence = next(_numbers)
        calls._pending[call.sequence] = call
        calls._next_deadline = min(calls._next_deadline, call.deadline)
        self.send(kind, header, flags=flags, parts=parts, sequence=call.sequence, context=context)
        return calls.result(call)

    def call(
        self,
        name: str | bytes,
        content: bytes = b"",
        *,
        flags: int = 0,
        parts: Sequence[Any] = (),
        kind: int = Kind.CALL_PYTHON,
        prefix: bytes = b"",
        context: int = 0,
    ) -> Any:
        """Send a call by name; return what its answer holds, or raise it."""
        encoded = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
        header = prefix + COUNT.pack(len(encoded)) + encoded + content
        return self.request(kind, header, flags=flags, parts=parts, context=context)

    def pickled(
        self,
        data: bytes,
        name: str = "tests.rpc.attacks.victim:echo",
        *,
        flags: int = 0,
        parts: Sequence[Any] = (),
    ) -> Any:
        """Send a call with pickled arguments; with an empty name, the pickle names the function."""
        return self.call(name, data, flags=codec.PICKLED | flags, parts=parts)

    def raw(self, message: bytes, *payloads: bytes) -> None:
        """Send bytes as an eager message, and others as payloads, past our transport."""
        transport = self.agent.dispatcher._transport
        requests = [transport._mpi.Isend([message, MPI.BYTE], self.to, transport._eager_tag)]
        requests += [
            transport._mpi.Isend([payload, MPI.BYTE], self.to, transport._payload_tag)
            for payload in payloads
        ]
        for request in requests:
            request.Wait()

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a listed function as any worker would."""
        return rpc.rpc_sync(self.to, function, args=args, timeout=WAIT_S)

    def look(self) -> Seen:
        """Return the state that the victim reports."""
        return Seen(*self.ask(victim.look))


class Attack(NamedTuple):
    """One attack.

    Attributes:
        name: Its own.
        idea: A line.
        reason: A pattern of the text that must be in the answer or in the worker's log; empty where
            nothing need be said.
        run: Called with an ``Attacker``; raises what the worker answers.
        ranks: How many workers it needs.
    """

    name: str
    idea: str
    reason: str
    run: Callable[[Attacker], Any]
    ranks: int


class Attacks(list[Attack]):
    """The attacks of one module, each noted as it is defined."""

    def __call__(self, idea: str, reason: str, ranks: int = 2) -> Callable[[Any], Any]:
        """Note the decorated function."""

        def note(run: Any) -> Any:
            self.append(Attack(run.__name__, idea, reason, run, ranks))
            return run

        return note


def outcome_of(attack: Attack, attacker: Attacker) -> list[str]:
    """Run an attack; return what is wrong with how the worker took it.

    Empty where it was refused as it should be.
    """
    before = attacker.look()
    outcome = ""
    is_refused = False
    try:
        result = attack.run(attacker)
        if result is not None:
            outcome = f"the attack was accepted, with the answer {result!r:.200}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
        is_refused = True
    if is_refused and not re.search(attack.reason, outcome, re.S):
        is_refused = False
    log: list[str] = []
    deadline = time.monotonic() + _LOG_S
    while True:
        seen = attacker.look()
        log += seen.log
        if (
            is_refused
            or re.search(attack.reason, "\n".join(log), re.S)
            or time.monotonic() > deadline
        ):
            break
        time.sleep(0.02)
    wrong = []
    if not is_refused and not re.search(attack.reason, "\n".join(log), re.S):
        wrong.append(
            f"no {attack.reason!r} in the answer or the log; answered: {outcome or 'nothing'}; "
            f"logged: {log}"
        )
    if attack.reason and not log and not is_refused:
        wrong.append("nothing was logged")
    if outcome.startswith("the attack was accepted"):
        wrong.append(outcome)
    if seen.fired != before.fired:
        wrong.append(f"code ran that is not listed: {seen.fired[len(before.fired) :]}")
    if seen.entries != before.entries:
        wrong.append(f"the list has changed: {seen.entries}")
    return wrong
