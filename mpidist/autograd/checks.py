"""Checks of the engine's messages before anything of them is used: fields, types, ranks, who may say what. Pure.

What fails a check is a ``FrameError``. The engine fails the pass that the message belongs to with
it, if the sender has a say in that pass; else the message is logged and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpidist.autograd.context import MODES, SMART, WORKER_SHIFT, Context
from mpidist.autograd.control_messages import Notice
from mpidist.autograd.recording import Send
from mpidist.errors import FrameError
from mpidist.rpc.rref import RRef

_END = 1 << 64
_BARE = frozenset({Notice.CLEANUP, Notice.ADOPT})  # they name no pass
_TO_INITIATOR = frozenset({Notice.DONE, Notice.FAILED, Notice.SUMMARY, Notice.REPORT})
_OF_INITIATOR = frozenset({Notice.ASK, Notice.AWAIT, Notice.PROBE})
_OF_SMART = frozenset({Notice.ASK, Notice.SUMMARY, Notice.AWAIT})


def initiator_of(key: int) -> int:
    """Return the rank of the worker that began a pass."""
    return key >> WORKER_SHIFT


def number(value: Any, what: str, workers: int) -> int:
    """Return a number of a context, a pass or a message.

    Args:
        value: What came.
        what: Its name, for the error.
        workers: How many there are.

    Raises:
        FrameError: No number that one of the workers makes.
    """
    if type(value) is not int or not 0 < value < _END or value >> WORKER_SHIFT >= workers:
        raise FrameError(f"no {what} of this job: {_shown(value)}")
    return value


def head(content: Any, workers: int) -> tuple[Notice, int, int, tuple[Any, ...]]:
    """Return the notice, its context, its pass (0 for those without one), and what follows.

    Raises:
        FrameError: It is none.
    """
    if (
        type(content) is not tuple
        or len(content) < 2
        or type(content[0]) is not int
        or content[0] not in _LENGTHS
    ):
        raise FrameError(f"no notice of distributed autograd: {_shown(content)}")
    what = Notice(content[0])
    if len(content) != _LENGTHS[what]:
        raise FrameError(f"{what.name} has {_LENGTHS[what]} fields; got {len(content)}")
    context = number(content[1], "context", workers)
    if what in _BARE:
        return what, context, 0, ()
    key = number(content[2], "pass", workers)
    if what in _OF_SMART and not key & SMART:
        raise FrameError(f"{what.name} for pass {key}, which is not of SMART mode")
    return what, context, key, content[3:]


def sender(
    what: Notice, source: int, me: int, context: int, key: int, found: Context | None
) -> None:
    """Refuse a notice that its sender may not send, or that is not for this worker: see ``notices``.

    Args:
        what: The notice.
        source: The sender's rank.
        me: This worker's.
        context: Its number.
        key: The pass.
        found: The context here; None if it is not known.

    Raises:
        FrameError: As said.
    """
    owner = context >> WORKER_SHIFT
    if what in _TO_INITIATOR:
        is_right = initiator_of(key) == me
    elif what in _OF_INITIATOR:
        is_right = initiator_of(key) == source
    elif what == Notice.STOP:
        is_right = (
            initiator_of(key) == source
            or found is None
            or source in found.callees
            or source in found.callers
        )
    elif what == Notice.CLEANUP:
        is_right = owner != me and (source == owner or found is None or source in found.callers)
    else:
        is_right = owner == me
    if not is_right:
        raise FrameError(
            f"rank {source} has no say in {what.name} of context {context}, pass {key}"
        )


def body(what: Notice, rest: Sequence[Any], workers: int) -> None:
    """Refuse what follows the pass if it is not of the notice's form.

    Raises:
        FrameError: It is not.
    """
    for check, value in zip(_FIELDS[what], rest, strict=True):
        if not check(value, workers):
            raise FrameError(f"{what.name} with a field of another form: {_shown(value)}")


def gradients(send: Send | None, source: int, message: int, found: list[Any]) -> None:
    """Refuse gradients that are not those of the tensors that were sent; detach those that have a graph of their own.

    Shape, dtype and device are the sent tensor's. torch's engine would sum, cast and move what
    differs without a word.

    Args:
        send: What this worker has recorded of the message; None for nothing.
        source: The sender of the gradients.
        message: The message's number.
        found: The gradients, or None for those that there are not; changed in place.

    Raises:
        FrameError: As said.
    """
    if send is None or send.to != source:
        raise FrameError(
            f"rank {source} sent gradients of message {message}, which this worker has not sent to "
            "it"
        )
    metadata = send.metadata()
    if len(found) != len(metadata):
        raise FrameError(
            f"rank {source} sent {len(found)} gradients of message {message}, which has "
            f"{len(metadata)} tensors"
        )
    for place, (one, expected) in enumerate(zip(found, metadata, strict=True)):
        if one is None:
            continue
        if not isinstance(one, torch.Tensor):
            raise FrameError(
                f"rank {source} sent a {type(one).__name__} as gradient {place} of message "
                f"{message}"
            )
        shape = tuple(expected.shape)
        if (
            tuple(one.shape) != shape
            or one.dtype is not expected.dtype
            or one.device != expected.device
        ):
            raise FrameError(
                f"rank {source} sent a gradient of shape {tuple(one.shape)}, {one.dtype} on "
                f"{one.device} for tensor {place} of "
                f"message {message}, which is of shape {shape}, {expected.dtype} on "
                f"{expected.device}"
            )
        if one.requires_grad:  # a node has returned what is not its own, a parameter say
            found[place] = one.detach()


def request(content: Any, workers: int) -> tuple[RRef[Any], int, bool, str]:
    """Return reference, context, whether to retain the graph, and mode of a request for a pass from the value of a reference.

    Raises:
        FrameError: It has another form, or the reference is another worker's.
    """
    if type(content) is not tuple or len(content) != 4:
        raise FrameError(f"backward() of a reference has four arguments; got {_shown(content)}")
    reference, context, retain, mode = content
    if type(reference) is not RRef or not reference.is_owner():
        raise FrameError(
            f"backward() of a reference needs one of this worker's; got {_shown(reference)}"
        )
    number(context, "context", workers)
    if type(retain) is not bool:
        raise FrameError(f"retain_graph is a bool; got {_shown(retain)}")
    if type(mode) is not str or mode not in MODES:
        raise FrameError(f"mode is one of {MODES}; got {_shown(mode)}")
    return reference, context, retain, mode


def _is_rank(value: Any, workers: int) -> bool:
    return type(value) is int and 0 <= value < workers


def _is_number(value: Any, workers: int) -> bool:
    return type(value) is int and 0 < value < _END


def _are_ranks(value: Any, workers: int) -> bool:
    return type(value) is tuple and all(_is_rank(each, workers) for each in value)


def _are_numbers(value: Any, workers: int) -> bool:
    return type(value) is tuple and all(_is_number(each, workers) for each in value)


def _are_hops(value: Any, workers: int) -> bool:
    return type(value) is list and all(
        type(hop) is tuple
        and len(hop) == 2
        and _is_number(hop[0], workers)
        and _is_rank(hop[1], workers)
        for hop in value
    )


def _is_summary(value: Any, workers: int) -> bool:
    return type(value) is dict and all(
        _is_number(name, workers) and _are_hops(hops, workers) for name, hops in value.items()
    )


def _is_flag(value: Any, workers: int) -> bool:
    return type(value) is bool


def _is_duration(value: Any, workers: int) -> bool:
    return type(value) is float and value >= 0.0  # not of NaN


def _are_texts(value: Any, workers: int) -> bool:
    return type(value) is list and all(type(each) is str for each in value)


def _is_anything(value: Any, workers: int) -> bool:
    return True


_FIELDS: dict[Notice, tuple[Callable[[Any, int], bool], ...]] = {
    Notice.DONE: (_are_ranks,),
    # Whoever rebuilds the error checks its description.
    Notice.FAILED: (_is_anything,),
    Notice.STOP: (),
    Notice.ASK: (),
    Notice.SUMMARY: (_is_summary, _are_ranks),
    Notice.AWAIT: (_is_flag, _are_numbers),
    Notice.PROBE: (),
    Notice.REPORT: (_is_duration, _are_texts, _are_ranks),
    Notice.CLEANUP: (),
    Notice.ADOPT: (),
}
_LENGTHS = {what: len(fields) + (2 if what in _BARE else 3) for what, fields in _FIELDS.items()}


def _shown(value: Any) -> str:
    # Not by the value's own representation, which may be as long as the message.
    return str(value) if type(value) in (bool, float, type(None)) else f"a {type(value).__name__}"
