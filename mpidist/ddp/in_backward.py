"""Optimizers of ``_apply_optimizer_in_backward``, stepped when the gradients are averaged.

Their own hooks would step with each rank's own gradients, before the average, and the ranks would
diverge.

Source: ``torch.nn.parallel.DistributedDataParallel._setup_in_backward_optimizers``. There they step
bucket by bucket within the backward pass; here at its end, with the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mpidist.dynamo import untraced

_OPTIMIZERS = "_in_backward_optimizers"


def names_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the parameters with such an optimizer; the same on all ranks."""
    return [name for name, parameter in named if hasattr(parameter, _OPTIMIZERS)]


def require_none(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Require that no parameter has such an optimizer.

    Raises:
        ValueError: A parameter has one. The optimizer would step on the owner's rank alone, and the
            ranks' weights would differ.
    """
    found = names_of(named)
    if found:
        raise ValueError(
            "gradients that leave to their owners cannot serve optimizers that step in the "
            f"backward pass, which {', '.join(found[:10])} have: use a sharded optimizer, or a "
            "hook that averages on all ranks"
        )


@untraced
def detach_hooks(parameters: Sequence[torch.Tensor]) -> None:
    """Remove the hooks that step an optimizer as soon as its gradient is accumulated.

    And torch's reference to the node that accumulates, which refers to the parameter: without, the
    parameters, and the memory in which their gradients lie, would outlive the module.
    """
    with_optimizers = [parameter for parameter in parameters if hasattr(parameter, _OPTIMIZERS)]
    if not with_optimizers:
        return
    from torch.distributed.optim import apply_optimizer_in_backward as torchs

    for parameter in with_optimizers:
        for handle in torchs.param_to_optim_hook_handle_map.pop(parameter, ()):
            handle.remove()
        torchs.param_to_acc_grad_map.pop(parameter, None)


def step(parameters: Sequence[torch.Tensor], used: Sequence[bool]) -> None:
    """Step the optimizers of parameters with an averaged gradient, and clear the gradient.

    Args:
        used: For each parameter whether any rank has a gradient.
    """
    for parameter, is_used in zip(parameters, used, strict=True):
        optimizers = getattr(parameter, _OPTIMIZERS, ())
        if optimizers and is_used and parameter.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None
