"""Validation of the engine's messages before use: fields, types, ranks, permitted senders. Pure.

A failed check raises ``FrameError``. If the sender has a part in the pass of the message, the
engine fails the pass with this error; otherwise the message is logged and dropped.
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
_BARE = frozenset({Notice.CLEANUP, Notice.ADOPT})  # without a pass
_TO_INITIATOR = frozenset({Notice.DONE, Notice.FAILED, Notice.SUMMARY, Notice.REPORT})
_OF_INITIATOR = frozenset({Notice.ASK, Notice.AWAIT, Notice.PROBE})
_OF_SMART = frozenset({Notice.ASK, Notice.SUMMARY, Notice.AWAIT})


def initiator_of(key: int) -> int:
    """Return the rank of the worker that began a pass."""
    return key >> WORKER_SHIFT


def number(value: object, what: str, workers: int) -> int:
    """Return a received number of a context, a pass or a message.

    Args:
        value: The received value.
        what: The field's name, for the error.
        workers: Number of workers.

    Raises:
        FrameError: The value is no number that a worker of this job makes.
    """
    if type(value) is not int or not 0 < value < _END or value >> WORKER_SHIFT >= workers:
        raise FrameError(f"no {what} of this job: {_shown(value)}")
    return value


def head(content: object, workers: int) -> tuple[Notice, int, int, tuple[Any, ...]]:
    """Return a message's notice, context, pass (0 for a notice without one) and remaining fields.

    Raises:
        FrameError: The message is no notice.
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
    """Refuse a notice that its sender may not send, or that is not meant for this worker.

    The table in ``control_messages`` lists the permitted senders.

    Args:
        what: The notice.
        source: Rank of the sender.
        me: Rank of this worker.
        context: Number of the context.
        key: Number of the pass.
        found: This worker's context of that number, or None.

    Raises:
        FrameError: The sender may not send the notice.
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


def body(what: Notice, rest: Sequence[object], workers: int) -> None:
    """Refuse fields after the pass that do not have the notice's types.

    Raises:
        FrameError: A field has another type or value range.
    """
    for check, value in zip(_FIELDS[what], rest, strict=True):
        if not check(value, workers):
            raise FrameError(f"{what.name} with a field of another form: {_shown(value)}")


def gradients(send: Send | None, source: int, message: int, found: list[Any]) -> None:
    """Refuse gradients that do not match the sent tensors; detach gradients that require grad.

    Shape, dtype and device must be those of the sent tensor, because torch's engine would silently
    sum, cast or move other gradients.

    Args:
        send: This worker's record of the message, or None.
        source: Rank of the sender of the gradients.
        message: Number of the message.
        found: Gradients, None for an undefined one; changed in place.

    Raises:
        FrameError: The gradients do not match.
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
    for index, (one, expected) in enumerate(zip(found, metadata, strict=True)):
        if one is None:
            continue
        if not isinstance(one, torch.Tensor):
            raise FrameError(
                f"rank {source} sent a {type(one).__name__} as gradient {index} of message "
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
                f"{one.device} for tensor {index} of message {message}, which is of shape {shape}, "
                f"{expected.dtype} on {expected.device}"
            )
        # A node may return a tensor that is not its own result, for example a parameter.
        if one.requires_grad:
            found[index] = one.detach()


def request(content: object, workers: int) -> tuple[RRef[object], int, bool, str]:
    """Return reference, context, retain_graph and mode of a request for ``RRef.backward``.

    Raises:
        FrameError: The request has other fields, or the reference is owned by another worker.
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


def _is_rank(value: object, workers: int) -> bool:
    return type(value) is int and 0 <= value < workers


def _is_number(value: object, workers: int) -> bool:
    return type(value) is int and 0 < value < _END


def _are_ranks(value: object, workers: int) -> bool:
    return type(value) is tuple and all(_is_rank(each, workers) for each in value)


def _are_numbers(value: object, workers: int) -> bool:
    return type(value) is tuple and all(_is_number(each, workers) for each in value)


def _are_hops(value: object, workers: int) -> bool:
    return type(value) is list and all(
        type(hop) is tuple
        and len(hop) == 2
        and _is_number(hop[0], workers)
        and _is_rank(hop[1], workers)
        for hop in value
    )


def _is_summary(value: object, workers: int) -> bool:
    return type(value) is dict and all(
        _is_number(name, workers) and _are_hops(hops, workers) for name, hops in value.items()
    )


def _is_flag(value: object, workers: int) -> bool:
    return type(value) is bool


def _is_duration(value: object, workers: int) -> bool:
    return type(value) is float and value >= 0.0  # false for NaN


def _are_texts(value: object, workers: int) -> bool:
    return type(value) is list and all(type(each) is str for each in value)


def _is_anything(value: object, workers: int) -> bool:
    return True


_FIELDS: dict[Notice, tuple[Callable[[object, int], bool], ...]] = {
    Notice.DONE: (_are_ranks,),
    # remote_error.rebuild checks the description.
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


def _shown(value: object) -> str:
    # repr() of the value may be as long as the message.
    return str(value) if type(value) in (bool, float, type(None)) else f"a {type(value).__name__}"
