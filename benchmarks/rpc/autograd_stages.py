"""Stages of a step of distributed autograd: stamps on two workers, and the step's time by stage.

A stamp is begin and end of a call of one of mpidist's functions, which is wrapped meanwhile; what
the called worker's own functions take is in its recorder. All times are of the node's monotonic
clock, which both workers read. While worker 0 waits, the time belongs to what worker 1 does, or to
the message that is under way; so the stages of a step add up to the step.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mpidist.comm.recorder import file_format, recorder, recording
from mpidist.comm.recorder.recording import Kind
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.recorder.tail import Tail
from mpidist.rpc import current
from mpidist.rpc.threads.pool import HANDLED

# Outside the wrapped functions.
STEP, WAITING, FUNCTION = "program", "waiting", "called function"
MPI, UNDER_WAY = "MPI_Isend", "message under way, and polls"
# From a message's arrival on; ``QUEUED`` where an action is left, which is ``HANDED`` to a handler.
TAKEN, QUEUED, HANDED = "message taken up", "message queued", "from poll to handler"
STAMPS = "stamps"
OF_MPI = (MPI, UNDER_WAY)

# Module, function, and stage.
_WRAPPED = (
    ("rpc.autograd_cases", "Chain.__call__", STEP),
    ("mpidist.rpc.calls.pending", "PendingCalls.invoke", "call"),
    ("mpidist.rpc.calls.pending", "PendingCalls.invoke_async", "call"),
    ("mpidist.rpc.calls.pending", "PendingCalls.start", "call registered"),
    ("mpidist.rpc.values.codec", "encode_function", "arguments to bytes"),
    ("mpidist.rpc.values.codec", "encode", "result or gradient to bytes"),
    ("mpidist.rpc.calls.wire", "Wire.post", "header"),
    ("mpidist.comm.transport.transport", "Transport.send", "message to MPI"),
    ("mpidist.rpc.threads.polling", "Polling.wait", WAITING),
    ("mpidist.rpc.threads.polling", "Polling.note_call", WAITING),
    ("mpidist.rpc.calls.reader", "Reader.decode_answer", "result from bytes"),
    ("mpidist.rpc.calls.reader", "Reader.decode_call", "arguments from bytes"),
    ("mpidist.rpc.serving.requests", "Request.run", "request"),
    ("mpidist.rpc.calls.engine_messages", "EngineMessages._decode", "gradient from bytes"),
    ("mpidist.rpc.calls.engine_messages", "EngineMessages.send", "gradient or notice sent"),
    ("mpidist.rpc.calls.engine_messages", "EngineMessages._run", "gradient's task"),
    ("mpidist.autograd.engine", "Engine.leaving", "send recorded"),
    ("mpidist.autograd.engine", "Engine.arriving", "receive recorded"),
    ("mpidist.autograd.engine", "Engine.release", "context released"),
    ("mpidist.autograd.parts", "Parts.receive_gradients", "gradient checked"),
    ("mpidist.autograd.dependencies", "Plan.__init__", "plan"),
    ("mpidist.autograd.local_pass", "LocalPass.__init__", "part begun"),
    ("mpidist.autograd.local_pass", "LocalPass.deliver", "part"),
    ("mpidist.autograd.local_pass", "_run_backward", "torch's engine"),
    ("mpidist.autograd.gradients", "Gradients.add", "leaves' gradients added"),
    ("mpidist.autograd.initiator", "Initiator.backward", "pass begun and ended"),
    ("mpidist.optim.distributed_optimizer", "DistributedOptimizer.step", "optimizer's call"),
    ("mpidist.optim.functional.optimizer", "FunctionalOptimizer.step", "optimizer"),
)
_PHASES = (
    ("rpc.autograd_cases", "Chain.loss", "forward"),
    ("rpc.autograd_stacks", "Stack.backward", "backward"),
    ("mpidist.optim.distributed_optimizer", "DistributedOptimizer.step", "step"),
)
_REST = "context"
PHASES = (*(name for _, _, name in _PHASES), _REST)
NAMES = (
    *dict.fromkeys(stage for _, _, stage in _WRAPPED),
    FUNCTION, MPI, TAKEN, QUEUED, HANDED, UNDER_WAY, STAMPS, *(f"phase {one}" for one in PHASES),
)  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(NAMES)}


class Span(NamedTuple):
    """One stamped call.

    Attributes:
        stage: Number in ``NAMES``.
        thread: Native id.
        begin_ns: Of the monotonic clock.
        end_ns: Of the same.
    """

    stage: int
    thread: int
    begin_ns: int
    end_ns: int


class Piece(NamedTuple):
    """Time in which a thread is in one stage, and in none within it."""

    begin_ns: int
    end_ns: int
    stage: str


Key = tuple[str, int, str]  # phase, worker, stage

_spans: list[tuple[int, int, int, int]] = []
_undo: list[tuple[Any, str, Any]] = []
_tails: list[Tail] = []


class _Here(threading.local):
    arrived_ns: int | None = None

    def __init__(self) -> None:
        self.thread = threading.get_native_id()  # as the recorder has it


_here = _Here()


def install() -> None:
    """Wrap the functions, before ``init_rpc``: workers keep bound methods from then on."""
    for module, path, stage in _WRAPPED:
        _replace(module, path, functools.partial(_stamped, _NUMBERS[stage]))
    for module, path, phase in _PHASES:
        _replace(module, path, functools.partial(_stamped, _NUMBERS[f"phase {phase}"]))
    _replace("mpidist.comm.transport.transport", "Transport.poll", _arrival)
    _replace("mpidist.rpc.serving.dispatcher", "Dispatcher.poll", _dispatch)


def install_in_agent() -> None:
    """Wrap the one function of MPI that sends, after ``init_rpc``."""
    sends: Any = current.require().dispatcher._transport._sends
    _undo.append((sends, "isend", sends.isend))
    sends.isend = _stamped(_NUMBERS[MPI], sends.isend)


def remove() -> None:
    """Undo ``install``."""
    while _undo:
        owner, name, before = _undo.pop()
        setattr(owner, name, before)
    _spans.clear()
    _tails.clear()


def begin() -> None:
    """Drop the stamps so far, on the worker that this is called on.

    Raises:
        RuntimeError: The recorder is off.
    """
    ring = recorder.of_process()
    if not isinstance(ring, Ring):
        raise RuntimeError("the stages of called functions are in the recorder: MPIDIST_RECORDER=0")
    _tails[:] = [Tail(ring)]
    _spans.clear()


def collected() -> torch.Tensor:
    """Return the stamps since ``begin`` as rows, with those of called functions."""
    ring = recorder.of_process()
    assert isinstance(ring, Ring)
    (tail,) = _tails
    slots = tail.read()
    signatures = recording.read_table(ring.copied_table()).signatures
    if tail.lost:
        raise RuntimeError(f"the recorder has lost {tail.lost} entries: take fewer steps")
    entries = [recording.entry(slot, signatures) for slot in file_format.SLOT.iter_unpack(slots)]
    functions = [
        (_NUMBERS[FUNCTION], entry.thread, entry.begin_ns, entry.end_ns)
        for entry in entries
        if entry.kind is Kind.HANDLER and entry.end_ns is not None
    ]
    return torch.tensor([*_spans, *functions], dtype=torch.int64).reshape(-1, 4)


def cost_ns() -> int:
    """Return what a stamp costs behind its end: that much of what follows is its own time."""
    kept, calls = list(_spans), 2000
    empty = _stamped(0, _nothing)
    start = time.monotonic_ns()
    for _ in range(calls):
        empty()
    stamped = time.monotonic_ns() - start
    start = time.monotonic_ns()
    for _ in range(calls):
        _nothing()
    plain = time.monotonic_ns() - start
    _spans[:] = kept
    return max(stamped - plain, 0) // calls


def spans_of(rows: torch.Tensor) -> list[Span]:
    """Return the stamps of ``collected``."""
    return [Span(*row) for row in rows.tolist()]


def exclusive(spans: Iterable[Span], cost_ns: int = 0) -> list[Piece]:
    """Return the pieces of one thread's spans, which lie within each other or apart.

    Args:
        spans: Of one thread.
        cost_ns: Of a stamp, behind the end of each span.
    """
    found: list[Piece] = []
    open_spans: list[Span] = []
    at = 0

    def until(end_ns: int, stage: str) -> None:
        nonlocal at
        if end_ns > at:
            found.append(Piece(at, end_ns, stage))
            at = end_ns

    def close(limit_ns: float) -> None:
        while open_spans and open_spans[-1].end_ns <= limit_ns:
            last = open_spans.pop()
            until(last.end_ns, NAMES[last.stage])
            if open_spans:
                until(int(min(last.end_ns + cost_ns, limit_ns, open_spans[-1].end_ns)), STAMPS)

    for span in sorted(spans, key=lambda one: (one.begin_ns, -one.end_ns)):
        close(span.begin_ns)
        if open_spans:
            until(span.begin_ns, NAMES[open_spans[-1].stage])
        at = max(at, span.begin_ns)
        open_spans.append(span)
    close(float("inf"))
    return found


def handed(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with the time between a queued message and its handler as ``HANDED``."""
    found: list[Piece] = []
    is_queued = False
    for piece in pieces:
        if is_queued and piece.begin_ns > found[-1].end_ns:
            found.append(Piece(found[-1].end_ns, piece.begin_ns, HANDED))
        if is_queued and piece.stage == WAITING:
            piece = piece._replace(stage=HANDED)
        if piece.stage != STAMPS:
            is_queued = piece.stage == QUEUED
        found.append(piece)
    return found


def overlaid(own: Sequence[Piece], other: Sequence[Piece]) -> list[tuple[int, Piece]]:
    """Return (worker, piece) of the whole time of ``own``: the other's pieces where own waits.

    Args:
        own: Pieces of worker 0's thread, in order.
        other: Pieces of worker 1's threads, in order; what lies beside an earlier one is left out.
    """
    found: list[tuple[int, Piece]] = []
    place = 0
    for piece in own:
        if piece.stage != WAITING:
            found.append((0, piece))
            continue
        at = piece.begin_ns
        while place and other[place - 1].end_ns > at:
            place -= 1
        while place < len(other) and other[place].begin_ns < piece.end_ns:
            begin_ns, end_ns, stage = other[place]
            begin_ns, end_ns = max(begin_ns, at), min(end_ns, piece.end_ns)
            if end_ns > begin_ns:
                if begin_ns > at:
                    found.append((0, Piece(at, begin_ns, UNDER_WAY)))
                found.append((1, Piece(begin_ns, end_ns, stage)))
                at = end_ns
            place += 1
        if at < piece.end_ns:
            found.append((0, Piece(at, piece.end_ns, UNDER_WAY)))
    return found


def steps_of(
    own: Sequence[Span], other: Sequence[Span], cost_ns: int = 0
) -> tuple[list[dict[Key, float]], Counter[Key]]:
    """Return each step's time in us by phase, worker and stage, and the number of spans of each.

    Args:
        own: Spans of worker 0, which makes the steps.
        other: Spans of worker 1.
        cost_ns: Of a stamp.
    """
    steps = sorted(span for span in own if span.stage == _NUMBERS[STEP])
    (thread,) = {span.thread for span in steps}
    phases = sorted(
        (span.begin_ns, span.end_ns, NAMES[span.stage].removeprefix("phase "))
        for span in own
        if NAMES[span.stage].startswith("phase ")
    )
    main = [
        span for span in own if span.thread == thread and not NAMES[span.stage].startswith("phase ")
    ]
    by_thread: defaultdict[int, list[Span]] = defaultdict(list)
    for span in other:
        by_thread[span.thread].append(span)
    there = sorted(
        piece for spans in by_thread.values() for piece in handed(exclusive(spans, cost_ns))
    )
    bounds = sorted({at_ns for begin_ns, end_ns, _ in phases for at_ns in (begin_ns, end_ns)})
    times: list[dict[Key, float]] = [defaultdict(float) for _ in steps]
    number = 0
    for worker, piece in overlaid(handed(exclusive(main, cost_ns)), there):
        while number < len(steps) and steps[number].end_ns <= piece.begin_ns:
            number += 1
        if number == len(steps):
            break
        if piece.begin_ns < steps[number].begin_ns:
            continue
        inner = bounds[bisect_right(bounds, piece.begin_ns) : bisect_left(bounds, piece.end_ns)]
        for begin_ns, end_ns in itertools.pairwise((piece.begin_ns, *inner, piece.end_ns)):
            key = _phase_at(phases, begin_ns), worker, piece.stage
            times[number][key] += (end_ns - begin_ns) / 1e3
    counts = Counter(
        (_phase_at(phases, span.begin_ns), worker, NAMES[span.stage])
        for worker, spans in enumerate((main, other))
        for span in spans
        if steps[0].begin_ns <= span.begin_ns < steps[-1].end_ns
    )
    return times, counts


def _phase_at(phases: Sequence[tuple[int, int, str]], at_ns: int) -> str:
    number = bisect_right(phases, at_ns, key=lambda phase: phase[0]) - 1
    return phases[number][2] if number >= 0 and at_ns < phases[number][1] else _REST


def _replace(module: str, path: str, wrapped: Callable[[Any], Any]) -> None:
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    before = getattr(owner, name)
    _undo.append((owner, name, before))
    setattr(owner, name, wrapped(before))


def _stamped(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    clock, here, add = time.monotonic_ns, _here, _spans.append

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin_ns = clock()
        try:
            return function(*args, **kwargs)
        finally:
            add((number, here.thread, begin_ns, clock()))

    return wrapper


def _arrival(poll: Callable[..., Any]) -> Callable[..., Any]:
    clock, here = time.monotonic_ns, _here

    @functools.wraps(poll)
    def wrapper(*args: Any) -> Any:
        incoming = poll(*args)
        if incoming is not None:
            here.arrived_ns = clock()
        return incoming

    return wrapper


def _dispatch(poll: Callable[..., Any]) -> Callable[..., Any]:
    clock, here, add = time.monotonic_ns, _here, _spans.append
    taken, queued = _NUMBERS[TAKEN], _NUMBERS[QUEUED]

    @functools.wraps(poll)
    def wrapper(*args: Any) -> Any:
        here.arrived_ns = None
        action = poll(*args)
        if (begin_ns := here.arrived_ns) is not None:
            add((taken if action is HANDLED else queued, here.thread, begin_ns, clock()))
        return action

    return wrapper


def _nothing() -> None:
    """Return."""
