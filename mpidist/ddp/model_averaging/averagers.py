"""Averagers, called after each step of the optimizer: every ``period`` steps they average.

Source: ``torch.distributed.algorithms.model_averaging.averagers``, for names and meanings.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

from mpidist.comm.group_types import AnyGroup
from mpidist.comm.resolve_group import default_group, native_group
from mpidist.ddp.model_averaging.parameters import (
    Averaged,
    average_parameters_or_parameter_groups,
)
from mpidist.ddp.settings_checks import require_int


class ModelAverager(ABC):
    """Schedule by which parameters are averaged over a group.

    Args:
        process_group: A group of mpidist; None for the default.

    Attributes:
        step: Calls of ``average_parameters`` so far; part of a checkpoint.

    Raises:
        TypeError: The group is of another backend.
    """

    def __init__(self, process_group: AnyGroup = None) -> None:
        self.process_group = default_group() if process_group is None else process_group
        native_group(self.process_group)
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Averaged) -> None:
        """Count a step, and average at the steps of the schedule."""


class PeriodicModelAverager(ModelAverager):
    """Average parameters every ``period`` steps, after ``warmup_steps``.

    Args:
        period: Steps from one average to the next.
        warmup_steps: Steps before the first; the ``start_localSGD_iter`` of ``PostLocalSGDState``.
        process_group: A group of mpidist; None for the default.

    Raises:
        TypeError: A number is no int, or the group is of another backend.
        ValueError: ``period`` is below 1, or ``warmup_steps`` negative.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: AnyGroup = None) -> None:
        require_int("warmup_steps", warmup_steps, least=0)
        require_int("period", period, least=1)
        super().__init__(process_group)
        if period == 1:
            warn_of_period_1()
        self.warmup_steps = warmup_steps
        self.period = period

    def average_parameters(self, params: Averaged) -> None:
        """Count a step, and average the parameters with a gradient every ``period`` steps.

        Collective: over the group, by all ranks at the same steps.

        Args:
            params: Parameters, the parameter groups of an optimizer, or an optimizer.

        Raises:
            DisagreementError: Parameters differ between ranks (on all ranks).
        """
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


def warn_of_period_1() -> None:
    """Warn of parameters that are averaged at every step."""
    warnings.warn(
        "parameters are averaged at every step, which costs as much as averaging the gradients: "
        "DistributedDataParallel alone does the same",
        stacklevel=3,
    )
