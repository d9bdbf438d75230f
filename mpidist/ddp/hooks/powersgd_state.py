"""PowerSGD's settings and its state between steps, kept by parameter name."""

from __future__ import annotations

import copy
import gc
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.group_types import AnyGroup
from mpidist.comm.world_group import default_group, native_group
from mpidist.ddp.buckets.settings import require_int, require_real
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.lowrank import random_like

Tensor = torch.Tensor
T = TypeVar("T")

# Attributes that are neither saved nor copied.
_OWN = ("process_group", "_cache", "_numbered", "_parameters")
# Attributes that are saved, by type; for an int its least value.
_INTS = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 0,
    "random_seed": None,
    "compression_stats_logging_frequency": 1,
    "iter": 0,
    "total_numel_before_compression": 0,
    "total_numel_after_compression": 0,
}
_REALS = frozenset({"min_compression_rate", "orthogonalization_epsilon"})
_FLAGS = frozenset({"use_error_feedback", "warm_start", "batch_tensors_with_same_shape"})
_NAMES = frozenset(_INTS) | _REALS | _FLAGS | {"error_dict", "q_memory_dict"}

_log = logging.getLogger(__name__)


class PowerSGDState:
    """Settings of PowerSGD and its state between steps.

    A saved state (``torch.save``) has no group; a loaded one has the default group.
    ``torch.load(weights_only=True)`` reads its ``state_dict()`` as it is, and the object after
    ``torch.serialization.add_safe_globals(mpidist.ddp.SAFE_GLOBALS)``. The errors (``error_dict``)
    differ between ranks: before rank 0 alone saves, all ranks call ``consolidated``; to save every
    rank's, see ``mpidist.ddp.hooks.checkpoint``.

    Args:
        process_group: A group of mpidist, or None for the default.
        matrix_approximation_rank: r.
        start_powerSGD_iter: Steps of plain averaging before compression starts.
        min_compression_rate: Compress only matrices with (n + m) · r · rate < n · m.
        use_error_feedback: Add the error of a step's approximation to the next step's gradient.
        warm_start: Start from the last step's Q instead of a random one.
        orthogonalization_epsilon: Added to norms in Gram–Schmidt; 0 for QR.
        random_seed: Seed of the random Qs; the same on all ranks.
        compression_stats_logging_frequency: Steps from one log of the compression rate to the next.
        batch_tensors_with_same_shape: Multiply matrices of one shape in one call.

    Attributes:
        iter: Steps so far.
        error_dict: By parameter name, the error (the parameter's shape). Names in torch's
            DistributedDataParallel: ``names_of``.
        q_memory_dict: By parameter name, the last Q (m × r).

    Raises:
        TypeError: A rank, a number of steps or a seed is no int; a rate or an epsilon is no number.
        ValueError: The rank is below 1; ``start_powerSGD_iter``, ``min_compression_rate`` or
            epsilon is negative or not finite.

    Source:
        torch 2.13's ``PowerSGDState``, for the options. Unlike there, compression may start at any
        step.
    """

    def __init__(
        self,
        process_group: AnyGroup = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        require_int("matrix_approximation_rank", matrix_approximation_rank, least=1)
        require_int("start_powerSGD_iter", start_powerSGD_iter, least=0)
        require_int("random_seed", random_seed)
        require_int("compression_stats_logging_frequency", compression_stats_logging_frequency)
        require_real("min_compression_rate", min_compression_rate)
        require_real("orthogonalization_epsilon", orthogonalization_epsilon)
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.iter = 0
        self.error_dict: dict[str, Tensor] = {}
        self.q_memory_dict: dict[str, Tensor] = {}
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        # Factors by bucket, with the key for which they were computed.
        self._cache: dict[int, tuple[object, Any]] = {}
        # Parameters without names, with their names here, by id.
        self._numbered: dict[int, tuple[Tensor, str]] = {}
        # Of the module that the state serves, by name.
        self._parameters: dict[str, weakref.ref[Tensor]] = {}

    def state_dict(self) -> dict[str, object]:
        """Return all but the group as plain data and tensors, which are not copied."""
        held = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        return {
            name: operator.index(value) if name in _INTS else value for name, value in held.items()
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the result of ``state_dict``; the group stays.

        Raises:
            ValueError: ``state`` is no such state; nothing has been loaded.
        """
        _require_state(state)
        self.__dict__.update(state)
        self._cache, self._numbered = {}, {}

    def __getstate__(self) -> dict[str, object]:
        """Return all attributes but the group."""
        warnings.warn("a PowerSGD state is saved or copied without its process group", stacklevel=2)
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Load all attributes, and use the default group."""
        self.load_state_dict(state)
        self._parameters = {}
        self.process_group = default_group() if torch.distributed.is_initialized() else None
        warnings.warn(
            "a loaded PowerSGD state is on the default process group; set process_group for "
            "another",
            stacklevel=2,
        )

    def names_of(self, bucket: GradBucket) -> tuple[str, ...]:
        """Return the names of a bucket's parameters.

        In torch's DistributedDataParallel they are numbers, in the order of the first buckets: the
        same on all ranks, and in a resumed run with the same buckets.
        """
        names = bucket.names()
        if all(names):
            return names
        held = self._numbered
        for parameter in bucket.parameters():
            held.setdefault(id(parameter), (parameter, f"parameter {len(held)}"))
        return tuple(held[id(parameter)][1] for parameter in bucket.parameters())

    def cached(self, index: int, key: object, make: Callable[[], T]) -> T:
        """Return the cached ``make()`` of a bucket; call it again if the key has changed."""
        held = self._cache.get(index)
        if held is None or held[0] != key:
            held = self._cache[index] = (key, make())
        return held[1]

    def drop_cached(self, index: int) -> None:
        """Drop the cached value of a bucket."""
        self._cache.pop(index, None)

    def consolidated(self) -> PowerSGDState:
        """Return a state with the mean of all ranks' errors, which one file holds for all ranks.

        Training continues equally well: only the mean of the errors enters the averages.

        Collective: over the state's group, with the same parameters on all ranks.
        """
        group = native_group(self.process_group)
        mean = _sibling(self)
        for name in sorted(mean.error_dict):
            group.all_reduce(mean.error_dict[name], AVG)
        return mean

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements sent), over all steps so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0.0, before, after)

    def count_step(self, bucket: GradBucket) -> int:
        """Return a bucket's step, from 0; the last bucket completes the step."""
        step = self.iter
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                _log.info("PowerSGD compresses after %d steps", self.iter)
            if self.iter % self.compression_stats_logging_frequency == 0:
                _log.info(
                    "PowerSGD: compression rate %.1f, %d elements before, %d sent",
                    *self.compression_stats(),
                )
        return step

    def count_elements(self, before: int, after: int) -> None:
        """Count the elements of one bucket, before compression and as sent."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after

    def error_of(self, name: str, gradient: Tensor) -> Tensor:
        """Return a parameter's error, in its gradient's shape and strides; zeros at first.

        Raises:
            ValueError: The error is of another shape, because the state is of another module.
        """
        error = self.error_dict.get(name)
        if error is None:
            error = torch.zeros_like(gradient)
        elif error.shape != gradient.shape:
            raise ValueError(
                f"the PowerSGD state holds an error of shape {tuple(error.shape)} for {name!r}, "
                f"whose gradient has {tuple(gradient.shape)}: it is of another module; make a new "
                "one"
            )
        elif (error.device, error.dtype, error.stride()) != (
            gradient.device,
            gradient.dtype,
            gradient.stride(),
        ):
            # Loaded, or the gradient is now another hook's copy.
            error = torch.empty_like(gradient).copy_(error)
        self.error_dict[name] = error
        return error

    def initialize_q(self, name: str, q: Tensor, step: int) -> None:
        """Fill ``q`` with the last step's Q, or with random values, the same on all ranks."""
        last = self.q_memory_dict.get(name) if self.warm_start else None
        if last is not None and last.shape == q.shape:
            q.copy_(last)
        else:
            q.copy_(random_like(q, f"{self.random_seed} {step} {name}"))

    def forget_q(self, names: Sequence[str]) -> None:
        """Drop the Qs of these matrices; their next step starts from random values."""
        for name in names:
            self.q_memory_dict.pop(name, None)


def serve(state: object, named: Iterable[tuple[str, Tensor]]) -> None:
    """Let the state of a communication hook keep the errors of these parameters, of one module.

    Args:
        state: A state of PowerSGD, or one that holds such a state as ``powersgd``; others keep
            nothing by name.
        named: Names and parameters.

    Raises:
        ValueError: It keeps those of other parameters of these names, of a module that is in use.
    """
    powersgd = getattr(state, "powersgd", state)
    if not isinstance(powersgd, PowerSGDState):
        return
    given, known = dict(named), powersgd._parameters
    if _others(known, given):
        # A module that is no longer used lives on in cycles of references.
        gc.collect()
    if others := _others(known, given):
        raise ValueError(
            f"the state of the communication hook serves another module already, whose "
            f"{others[0]!r} is another parameter: the errors of both would be added to each "
            "other. Make a state for each module"
        )
    known.update({name: weakref.ref(parameter) for name, parameter in given.items()})


def drop_errors(state: object, names: Iterable[str]) -> None:
    """Drop the errors of parameters whose gradients the program has given up.

    The Qs stay, which are the same on all ranks.

    Args:
        state: See ``serve``.
    """
    powersgd = getattr(state, "powersgd", state)
    if isinstance(powersgd, PowerSGDState):
        for name in names:
            if name in powersgd.error_dict:
                powersgd.error_dict[name].zero_()


def _others(known: Mapping[str, weakref.ref[Tensor]], given: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters that are alive and others than the given ones."""
    alive = {name: known[name]() for name in given if name in known}
    return [name for name, held in alive.items() if held is not None and held is not given[name]]


def _require_state(state: object) -> None:
    if not isinstance(state, Mapping) or set(state) != _NAMES:
        raise ValueError(
            "a PowerSGD state holds its settings and what it keeps by name; got something else"
        )
    for name in _NAMES:
        value = state[name]
        if name in _INTS:
            require_int(name, value, least=_INTS[name])
        elif name in _REALS:
            require_real(name, value)
        elif name in _FLAGS:
            if type(value) is not bool:
                raise ValueError(f"{name} of a PowerSGD state is True or False; got {value!r}")
        elif type(value) is not dict or not all(
            type(key) is str and _is_dense(held) for key, held in value.items()
        ):
            raise ValueError(
                f"{name} of a PowerSGD state holds tensors by parameter name; got something else"
            )


def _is_dense(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.is_floating_point()
    )


def merged(states: Sequence[PowerSGDState]) -> PowerSGDState:
    """Return one state for the states of all ranks, with the mean of their errors.

    Args:
        states: The state of each rank of one run.

    Raises:
        ValueError: There is no state, or the states are of different steps.
    """
    if not states:
        raise ValueError("there is no PowerSGD state to merge")
    steps = {state.iter for state in states}
    if len(steps) > 1:
        raise ValueError(
            f"the PowerSGD states are of different steps ({', '.join(map(str, sorted(steps)))}), "
            "not of one run"
        )
    mean = _sibling(states[0])
    for name in {name for state in states for name in state.error_dict}:
        errors = [state.error_dict[name] for state in states if name in state.error_dict]
        mean.error_dict[name] = torch.stack(errors).sum(0) / len(states)
    return mean


def _sibling(state: PowerSGDState) -> PowerSGDState:
    """Return a copy of a state and its tensors, on the same group."""
    sibling = PowerSGDState.__new__(PowerSGDState)
    sibling.__dict__.update(
        {name: copy.copy(value) for name, value in state.__dict__.items() if name not in _OWN}
    )
    sibling._cache, sibling._numbered, sibling._parameters = {}, {}, {}
    sibling.process_group = state.process_group
    sibling.error_dict = {name: error.clone() for name, error in state.error_dict.items()}
    sibling.q_memory_dict = {name: q.clone() for name, q in state.q_memory_dict.items()}
    return sibling
