"""Checks of the answers of parameters' owners to a ``DistributedOptimizer``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from mpidist.errors import FrameError
from mpidist.optim.local_optimizer import LocalOptimizer
from mpidist.optim.param_groups import settings_of
from mpidist.rpc.rref import RRef
from mpidist.rpc.worker import WorkerInfo

_MAX_PARAMETERS = 1 << 24  # of one reference; the caller numbers them all


class Construction(NamedTuple):
    """An owner's answer to ``local.make``.

    Attributes:
        reference: Its local optimizer.
        counts: For each group, the number of parameters of each reference.
        settings: The settings of each group.
        defaults: The class's defaults.
    """

    reference: RRef[LocalOptimizer]
    counts: list[list[int]]
    settings: list[dict[str, object]]
    defaults: dict[str, object]


def construction(worker: WorkerInfo, answer: object, sizes: Sequence[int]) -> Construction:
    """Return an owner's answer to ``local.make``.

    Args:
        worker: The owner.
        answer: The received value.
        sizes: For each group, the number of references sent.

    Raises:
        FrameError: The answer has another form.
    """
    if (
        not _is_list(answer)
        or len(answer) != 4
        or type(answer[0]) is not RRef
        or answer[0].owner() != worker
    ):
        raise _refusal(worker, "its optimizer")
    reference, counts, settings, defaults = answer
    if (
        type(counts) is not list
        or type(settings) is not list
        or not len(counts) == len(settings) == len(sizes)
    ):
        raise _refusal(worker, "its groups")
    _require_names(worker, defaults)
    for own, values, size in zip(counts, settings, sizes, strict=True):
        group(worker, (own, values), size)
    return Construction(reference, counts, settings, defaults)


def group(worker: WorkerInfo, answer: object, size: int) -> tuple[list[int], dict[str, object]]:
    """Return an owner's answer to ``local.add_group``: counts of parameters, settings of the group.

    Args:
        worker: The owner.
        answer: The received value.
        size: The number of references sent.

    Raises:
        FrameError: The answer has another form.
    """
    if not _is_list(answer) or len(answer) != 2:
        raise _refusal(worker, "a group")
    counts, settings = answer
    if type(counts) is not list or len(counts) != size:
        raise _refusal(worker, "the parameters of its references")
    if not all(type(count) is int and 0 <= count <= _MAX_PARAMETERS for count in counts):
        raise _refusal(worker, "the parameters of its references")
    _require_names(worker, settings)
    if len(settings_of(settings)) != len(settings):
        raise _refusal(worker, "settings of a group")
    return counts, settings


def state(worker: WorkerInfo, answer: object, count: int) -> dict[int, object]:
    """Return an owner's answer to ``local.state``: the state of its parameters, by its own numbers.

    Args:
        worker: The owner.
        answer: The received value.
        count: The number of its parameters.

    Raises:
        FrameError: The answer has another form.
    """
    if type(answer) is not dict or not all(
        type(number) is int and 0 <= number < count for number in answer
    ):
        raise _refusal(worker, "a state")
    return answer


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return type(value) is list or type(value) is tuple


def _require_names(worker: WorkerInfo, values: object) -> dict[str, object]:
    if type(values) is not dict or not all(type(key) is str for key in values):
        raise _refusal(worker, "settings by name")
    return values


def _refusal(worker: WorkerInfo, what: str) -> FrameError:
    return FrameError(
        f"{worker.name} (rank {worker.id}) has answered with something else than {what}"
    )
