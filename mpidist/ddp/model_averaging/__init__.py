"""parameters → averagers → hierarchical: averages of parameters instead of gradients."""

from mpidist.ddp.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from mpidist.ddp.model_averaging.hierarchical import HierarchicalModelAverager
from mpidist.ddp.model_averaging.parameters import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]
