"""What is done with each kind of message: a table, one handler a kind.

``note`` runs in the polling thread as soon as the letter is there, in the order of letters; ``act`` once all of the message is
there, and returns what is left to do.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mpidist.comm.mailbox import Arrival
from mpidist.errors import MpidistError
from mpidist.rpc import codec, functions, interceptor, message, quiescence
from mpidist.rpc.agent import Agent
from mpidist.rpc.message import Header, Kind
from mpidist.rpc.polling import NOTHING_LEFT, Action
from mpidist.rpc.rref_store import Entry

logger = logging.getLogger("mpidist.rpc")


@dataclass(frozen=True)
class Handler:
    """How a kind of message is handled.

    Attributes:
        response: The kind of its answer; None if it has none.
        note: (agent, source, header); in order. What it returns is ``header.noted`` from then on.
        act: (agent, arrival, header); returns an Action.
    """

    response: int | None = None
    note: Callable[[Agent, int, Header], Any] | None = None
    act: Callable[[Agent, Arrival, Header], Action] | None = None


# Calls.


def _note_request(agent: Agent, source: int, header: Header) -> None:
    agent.take()


def _call(find: Callable[[Agent, Any], Any]) -> Callable[[Agent, Arrival, Header], Action]:
    def act(agent: Agent, arrival: Arrival, header: Header) -> Action:
        return Action(partial(_serve, agent, arrival, header, find), True)

    return act


def _serve(agent: Agent, arrival: Arrival, header: Header, find: Callable[[Agent, Any], Any]) -> None:
    """Run the function of a request, and answer; or let its future answer."""
    source, sequence = arrival.source, header.sequence
    try:
        result = _run(agent, arrival, header, find)
    except BaseException as error:
        _tell(agent, error)
        agent.answer_error(source, sequence, error)
        return
    if isinstance(result, functions.Later):
        result.future.then(partial(_answer_of_future, agent, source, header))
    else:
        agent.answer(source, sequence, Kind.RESULT, result, header.outer)


def _run(agent: Agent, arrival: Arrival, header: Header, find: Callable[[Agent, Any], Any]) -> Any:
    try:
        named, args, kwargs = agent.decoded(arrival)
    except AttributeError as error:
        raise MpidistError(
            f"{error}. Default RPC pickler does not serialize function code. "
            f"Ensure that UDFs are defined on both caller and callee modules"
        ) from error
    function = find(agent, named)
    with _context(arrival.source, header):
        return functions.called(function, args or (), kwargs or {})


def _context(source: int, header: Header) -> Any:
    engine = interceptor.registered()
    if header.outer is None or engine is None:
        return _NO_CONTEXT
    return engine.serving(source, header.outer)


_NO_CONTEXT = contextlib.nullcontext()


def _answer_of_future(agent: Agent, source: int, header: Header, future: Any) -> None:
    try:
        value = future.value()
    except BaseException as error:
        agent.answer_error(source, header.sequence, error)
    else:
        agent.answer(source, header.sequence, Kind.RESULT, value, header.outer)


def _python(agent: Agent, named: Any) -> Any:
    if agent.allowed is not None:
        agent.allowed.require_callable(named)
    return named


def _builtin(agent: Agent, named: str) -> Any:
    if agent.allowed is not None:
        agent.allowed.require_operator(named)
    found = _operators.get(named)
    if found is None:
        namespace, _, name = named.partition("::")
        found = _operators[named] = getattr(getattr(torch.ops, namespace), name)
    return found


_operators: dict[str, Any] = {}


def _script(agent: Agent, named: str) -> Any:
    if agent.allowed is not None:
        agent.allowed.require_operator(named)
    found = torch.jit._state._python_cu.find_function(named)
    if found is None:
        raise MpidistError(f'script function "{named}" is not defined on {agent.me.name}: define it on both workers')
    return found


def _tell(agent: Agent, error: BaseException) -> None:
    logger.warning("On %s: a function that was called from another worker raised", agent.me, exc_info=error)


# Calls whose result stays here.


def _note_remote(agent: Agent, source: int, header: Header) -> Entry:
    agent.take()
    # Kept from here on: the last holder may be gone before the function has run.
    return agent.store.create(*header.ids)


def _remote(find: Callable[[Agent, Any], Any]) -> Callable[[Agent, Arrival, Header], Action]:
    def act(agent: Agent, arrival: Arrival, header: Header) -> Action:
        return Action(partial(_serve_remote, agent, arrival, header, find), True)

    return act


def _serve_remote(agent: Agent, arrival: Arrival, header: Header, find: Callable[[Agent, Any], Any]) -> None:
    source, sequence, entry = arrival.source, header.sequence, header.noted
    try:
        result = _run(agent, arrival, header, find)
    except BaseException as error:
        _tell(agent, error)
        entry.set(error=error)
        agent.answer_error(source, sequence, error)
        return
    if isinstance(result, functions.Later):
        result.future.then(partial(_set_of_future, agent, source, header, entry))
        return
    try:
        refuse_unsendable(result)
    except MpidistError as error:
        entry.set(error=error)
        agent.answer_error(source, sequence, error)
        return
    entry.set(result)
    agent.answer(source, sequence, Kind.REMOTE_DONE, None, None)


def _set_of_future(agent: Agent, source: int, header: Header, entry: Entry, future: Any) -> None:
    try:
        value = future.value()
    except BaseException as error:
        entry.set(error=error)
        agent.answer_error(source, header.sequence, error)
    else:
        entry.set(value)
        agent.answer(source, header.sequence, Kind.REMOTE_DONE, None, None)


def refuse_unsendable(result: Any) -> None:
    """Raise for a result that no holder could ever fetch: a future."""
    if isinstance(result, torch._C.Future):
        raise MpidistError("Can not pickle torch.futures.Future; mark the function with rpc.functions.async_execution")


# References.


def _fetch(agent: Agent, arrival: Arrival, header: Header) -> Action:
    entry = agent.store.find(header.ids[0])
    if entry.is_set:
        return Action(partial(_answer_fetch, agent, arrival.source, header, entry), False)
    # No thread waits: who sets the value, answers.
    entry.when_set(lambda entry: agent.polling.submit(partial(_answer_fetch, agent, arrival.source, header, entry)))
    return NOTHING_LEFT


def _answer_fetch(agent: Agent, source: int, header: Header, entry: Entry) -> None:
    if entry.error is not None:
        agent.answer_error(source, header.sequence, entry.error)
        return
    for event in entry.events:
        event.hold()
    agent.answer(source, header.sequence, Kind.RESULT, entry.value, header.outer)


def _note_fork(agent: Agent, source: int, header: Header) -> None:
    agent.take_one_way()
    agent.store.add_forks([(header.ids[0], header.ids[1])])


def _note_delete(agent: Agent, source: int, header: Header) -> None:
    agent.take_one_way()
    agent.store.delete_fork(*header.ids)


# Answers.


def _answered(agent: Agent, arrival: Arrival, header: Header) -> Action:
    call = agent.pop_call(header.sequence)
    if call is None:
        return Action(partial(_drop, agent, arrival, header), False)
    call.arrival = arrival
    if call.future is not None:
        return Action(partial(agent.complete, call), call.future.has_callbacks)
    if call.settle is not None:
        call.settle(call)
    call.finish()
    return NOTHING_LEFT


def _drop(agent: Agent, arrival: Arrival, header: Header) -> None:
    """Let an answer go that nobody waits for any more, and the references in it."""
    for numbers in codec.references_in(message.content_of(header, arrival.letter, arrival.parts)):
        agent.forget(*numbers)


# Kinds of distributed autograd.


def _extension(response: int) -> Callable[[Agent, Arrival, Header], Action]:
    def act(agent: Agent, arrival: Arrival, header: Header) -> Action:
        return Action(partial(_serve_extension, agent, arrival, header, response), True)

    return act


def _serve_extension(agent: Agent, arrival: Arrival, header: Header, response: int) -> None:
    try:
        engine = interceptor.registered()
        if engine is None:
            raise MpidistError(f"{agent.me.name} does not handle messages of kind {Kind(header.kind).name}: no autograd is in use")
        result = engine.handle(arrival.source, header.kind, header.ids, agent.decoded(arrival))
    except BaseException as error:
        agent.answer_error(arrival.source, header.sequence, error)
    else:
        agent.answer(arrival.source, header.sequence, response, result, None)


# The end.


def _note_left(agent: Agent, source: int, header: Header) -> None:
    agent.worker_left(source)


HANDLERS: dict[int, Handler] = {
    Kind.CALL_PYTHON: Handler(Kind.RESULT, _note_request, _call(_python)),
    Kind.CALL_BUILTIN: Handler(Kind.RESULT, _note_request, _call(_builtin)),
    Kind.CALL_SCRIPT: Handler(Kind.RESULT, _note_request, _call(_script)),
    Kind.REMOTE_PYTHON: Handler(Kind.REMOTE_DONE, _note_remote, _remote(_python)),
    Kind.REMOTE_BUILTIN: Handler(Kind.REMOTE_DONE, _note_remote, _remote(_builtin)),
    Kind.REMOTE_SCRIPT: Handler(Kind.REMOTE_DONE, _note_remote, _remote(_script)),
    Kind.RREF_FETCH: Handler(Kind.RESULT, _note_request, _fetch),
    Kind.RREF_FORK: Handler(note=_note_fork),
    Kind.RREF_USER_DELETE: Handler(note=_note_delete),
    Kind.BACKWARD_AUTOGRAD: Handler(Kind.BACKWARD_AUTOGRAD_DONE, _note_request, _extension(Kind.BACKWARD_AUTOGRAD_DONE)),
    Kind.CLEANUP_AUTOGRAD: Handler(Kind.CLEANUP_AUTOGRAD_DONE, _note_request, _extension(Kind.CLEANUP_AUTOGRAD_DONE)),
    Kind.RESULT: Handler(act=_answered),
    Kind.REMOTE_DONE: Handler(act=_answered),
    Kind.EXCEPTION: Handler(act=_answered),
    Kind.BACKWARD_AUTOGRAD_DONE: Handler(act=_answered),
    Kind.CLEANUP_AUTOGRAD_DONE: Handler(act=_answered),
    Kind.LEAVE: Handler(note=_note_left),
    Kind.QUIET_REPORT: Handler(note=quiescence.note_report),
    Kind.QUIET_VERDICT: Handler(note=quiescence.note_verdict),
}
