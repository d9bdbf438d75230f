"""What is done with each kind of message: a table, one handler a kind.

``note`` runs in the polling thread as soon as the letter is there, in the order of letters; ``act`` once all of the message is
there, and returns what is left to do.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mpidist.comm.mailbox import Arrival
from mpidist.errors import MpidistError
from mpidist.rpc import functions, interceptor, message, quickness, quiescence, tensor_table
from mpidist.rpc.agent import Agent
from mpidist.rpc.message import Header, Kind
from mpidist.rpc.polling import NOTHING_LEFT, Action
from mpidist.rpc.rref_store import Entry
from mpidist.rpc.target import builtin

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


Find = Callable[[Agent, Any], Any]  # from what names a function in a message to the function
Succeed = Callable[[Agent, int, Header, Any], None]
Fail = Callable[[Agent, int, Header, BaseException], None]

# Calls.


def _note_request(agent: Agent, source: int, header: Header) -> None:
    agent.take()


def _calling(find: Find, succeed: Succeed, fail: Fail) -> Callable[[Agent, Arrival, Header], Action]:
    """Run the function that ``find`` returns; what becomes of its result, or of its exception, is the callers' to say."""

    def act(agent: Agent, arrival: Arrival, header: Header) -> Action:
        return Action(partial(_execute, agent, arrival, header, find, succeed, fail), True)

    return act


def _answer_with(agent: Agent, source: int, header: Header, value: Any) -> None:
    agent.answer(source, header.sequence, Kind.RESULT, value, header.outer)


def _answer_with_error(agent: Agent, source: int, header: Header, error: BaseException) -> None:
    agent.answer_error(source, header.sequence, error)


def _execute(agent: Agent, arrival: Arrival, header: Header, find: Find, succeed: Succeed, fail: Fail) -> None:
    """Decode a call and run it: here, or on another thread if it may take long."""
    try:
        named, args, kwargs = _decoded(agent, arrival)
        function = find(agent, named)
    except BaseException as error:
        _tell(agent, error)
        fail(agent, arrival.source, header, error)
        return
    key = quickness.key_of(function, args)
    run = partial(_run, agent, arrival.source, header, function, args, kwargs, key, succeed, fail)
    if agent.quickness.is_quick(key) or not agent.polling.is_leading():
        run()
    else:
        agent.polling.submit(run)


def _decoded(agent: Agent, arrival: Arrival) -> Any:
    try:
        return agent.decoded(arrival)
    except AttributeError as error:
        raise MpidistError(
            f"{error}. Default RPC pickler does not serialize function code. "
            f"Ensure that UDFs are defined on both caller and callee modules"
        ) from error


def _run(
    agent: Agent, source: int, header: Header, function: Any, args: Any, kwargs: Any, key: Any, succeed: Succeed, fail: Fail
) -> None:
    if agent.gil_waits is not None:
        _measure_lock(agent.gil_waits)
    start = time.monotonic()
    try:
        if header.outer is None:
            result = functions.called(function, args or (), kwargs or {})
        else:
            with _context(source, header):
                result = functions.called(function, args or (), kwargs or {})
    except BaseException as error:
        _tell(agent, error)
        fail(agent, source, header, error)
        return
    finally:
        agent.quickness.note(key, time.monotonic() - start)
    if isinstance(result, functions.Later):
        result.future.then(partial(_finish, agent, source, header, succeed, fail))
    else:
        succeed(agent, source, header, result)


def _measure_lock(waits: list[float]) -> None:
    """Give Python's lock away, and note how long it takes to come back."""
    start = time.perf_counter()
    time.sleep(0)
    waits.append(time.perf_counter() - start)
    del waits[:-1000]


def _finish(agent: Agent, source: int, header: Header, succeed: Succeed, fail: Fail, future: Any) -> None:
    try:
        value = future.value()
    except BaseException as error:
        fail(agent, source, header, error)
    else:
        succeed(agent, source, header, value)


def _context(source: int, header: Header) -> Any:
    engine = interceptor.registered()
    if header.outer is None or engine is None:
        return contextlib.nullcontext()
    return engine.serving(source, header.outer)


def _python(agent: Agent, named: Any) -> Any:
    if agent.allowed is not None:
        agent.allowed.require_callable(named)
    return named


def _builtin(agent: Agent, named: str) -> Any:
    if agent.allowed is not None:
        agent.allowed.require_operator(named)
    return builtin(named)


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


def _keep(agent: Agent, source: int, header: Header, value: Any) -> None:
    if isinstance(value, torch._C.Future):
        error = MpidistError("Can not pickle torch.futures.Future; mark the function with rpc.functions.async_execution")
        _keep_error(agent, source, header, error)
        return
    header.noted.set(value)
    agent.answer(source, header.sequence, Kind.REMOTE_DONE, None, None)


def _keep_error(agent: Agent, source: int, header: Header, error: BaseException) -> None:
    header.noted.set(error=error)
    agent.answer_error(source, header.sequence, error)


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
    for numbers in tensor_table.references_in(message.content_of(header, arrival.letter, arrival.parts)):
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
            raise MpidistError(
                f"{agent.me.name} does not handle messages of kind {Kind(header.kind).name}: no autograd is in use"
            )
        result = engine.handle(arrival.source, header.kind, header.ids, agent.decoded(arrival))
    except BaseException as error:
        agent.answer_error(arrival.source, header.sequence, error)
    else:
        agent.answer(arrival.source, header.sequence, response, result, None)


# The end.


def _note_left(agent: Agent, source: int, header: Header) -> None:
    agent.worker_left(source)


HANDLERS: dict[int, Handler] = {
    Kind.CALL_PYTHON: Handler(Kind.RESULT, _note_request, _calling(_python, _answer_with, _answer_with_error)),
    Kind.CALL_BUILTIN: Handler(Kind.RESULT, _note_request, _calling(_builtin, _answer_with, _answer_with_error)),
    Kind.CALL_SCRIPT: Handler(Kind.RESULT, _note_request, _calling(_script, _answer_with, _answer_with_error)),
    Kind.REMOTE_PYTHON: Handler(Kind.REMOTE_DONE, _note_remote, _calling(_python, _keep, _keep_error)),
    Kind.REMOTE_BUILTIN: Handler(Kind.REMOTE_DONE, _note_remote, _calling(_builtin, _keep, _keep_error)),
    Kind.REMOTE_SCRIPT: Handler(Kind.REMOTE_DONE, _note_remote, _calling(_script, _keep, _keep_error)),
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
