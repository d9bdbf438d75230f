"""Merging of batch statistics from several ranks. Pure.

Letters: W ranks; C channels; n_r values per channel on rank r, and N of them on all ranks.

Each rank contributes a row [n_r, needs a gradient, mean (C), variance (C)] in float64; n_r = -1
marks a refused input.

Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances" (1979): squares of differences of means, where E[x²] - E[x]² would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

REFUSED = -1.0
_HEAD = 2  # n_r, needs a gradient


def row_of(
    channels: int,
    count: float,
    needs_gradient: bool,
    mean: Tensor | None,
    variance: Tensor | None,
    device: torch.device | None = None,
) -> Tensor:
    """Return one rank's row of 2 + 2·C float64 elements.

    Args:
        channels: C.
        count: n_r, or ``REFUSED``.
        needs_gradient: The input needs a gradient.
        mean: C elements; None for an empty or refused batch, whose statistics are zeros.
        variance: C elements, or None.
        device: Of the row; None for the host.
    """
    head = torch.empty(_HEAD, dtype=torch.float64, device=device or "cpu")
    # Kernels take the numbers as arguments; a copy from the host's memory would wait for all work
    # queued on the device.
    for element, value in zip(head.split(1), (count, float(needs_gradient)), strict=True):
        element.fill_(value)
    if mean is None or variance is None:
        return torch.cat([head, head.new_zeros(2 * channels)])
    return torch.cat([head, mean.double(), variance.double()])


@dataclass(frozen=True)
class Statistics:
    """Statistics of the whole batch.

    Attributes:
        count: N.
        mean: C elements, float64.
        variance: C elements, float64; divided by N.
    """

    count: int
    mean: Tensor
    variance: Tensor

    @property
    def unbiased(self) -> Tensor:
        """Return the variance divided by N - 1, which running statistics hold."""
        return self.variance * (self.count / max(self.count - 1, 1))


def merge(rows: Tensor, own_refusal: str | None = None) -> Statistics:
    """Merge the rows of all ranks in rank order; the result has the same bits on all ranks.

    Args:
        rows: W × (2 + 2·C).
        own_refusal: Reason why this rank has refused its input, or None.

    Raises:
        ValueError: On all ranks: an input was refused; the input needs a gradient on some ranks
            only, whose backward passes would wait for the other ranks; N is 1.
    """
    heads = rows[:, :_HEAD].tolist()
    refused = [rank for rank, (count, _) in enumerate(heads) if count == REFUSED]
    if own_refusal is not None:
        raise ValueError(f"SyncBatchNorm: {own_refusal}")
    if refused:
        raise ValueError(
            f"SyncBatchNorm: ranks {refused} of the group refused their input; their messages say "
            "why"
        )
    needing = [rank for rank, (_, needs) in enumerate(heads) if needs]
    if needing and len(needing) < len(heads):
        raise ValueError(
            f"SyncBatchNorm: the input needs a gradient on ranks {needing} and on no other: its "
            "backward pass is a collective, so run the forward pass with gradients (or under "
            "no_grad) on all ranks alike"
        )
    total = int(sum(count for count, _ in heads))
    if total == 1:
        raise ValueError(
            "SyncBatchNorm: expected more than 1 value per channel when training; got 1 on all "
            "ranks together"
        )
    means, variances = rows[:, _HEAD:].chunk(2, dim=1)
    weights = rows[:, :1] / max(total, 1)
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean).square())).sum(0)
    return Statistics(total, mean, variance)
