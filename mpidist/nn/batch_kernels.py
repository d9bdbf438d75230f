"""Local arithmetic of synchronised batch normalisation, by torch's kernels for CPU and CUDA.

On the CPU, torch's kernels for evaluation mode and their backward pass do the work, with fp16 and
bf16 computed in fp32. On CUDA the kernels are those of ``torch.nn.SyncBatchNorm``.

Letters: C channels. A batch is a dense tensor (see ``dense``), batch × C × …, not empty; ``mean``
and ``inverse`` (1 / √(variance + eps)) hold C elements, float64 for a float64 batch and else
float32.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_NARROW = (torch.float16, torch.bfloat16)
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def dense(batch: Tensor) -> Tensor:
    """Return the batch, or a contiguous copy if the kernels do not support its memory format."""
    return (
        batch
        if any(batch.is_contiguous(memory_format=form) for form in _FORMATS)
        else batch.contiguous()
    )


def statistics(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance (divided by the number of values) of each channel."""
    if batch.is_cuda:
        mean, inverse = torch.batch_norm_stats(batch, 0.0)
        # For variance 0 the kernel returns an inverse of 0 or infinity.
        return mean, inverse.double().square().reciprocal().masked_fill(inverse == 0, 0.0)
    return torch.batch_norm_update_stats(_wide(batch), None, None, 0.0)


def normalise(
    batch: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor
) -> Tensor:
    """Return (batch - mean) · inverse · weight + bias, in the batch's dtype and memory format."""
    if batch.is_cuda:
        return torch.batch_norm_elemt(batch, weight, bias, mean, inverse, 0.0)
    return _normalised(_wide(batch), _like(weight, mean), _like(bias, mean), mean, inverse).to(
        batch.dtype
    )


def sums(gradient: Tensor, batch: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Return 2 × C sums over the batch: of the gradient, and of gradient · normalised batch."""
    if batch.is_cuda:
        reduce = torch.batch_norm_backward_reduce
        by_bias, by_centred, _, _ = reduce(gradient, batch, mean, inverse, None, True, False, False)
        return torch.stack([by_bias, by_centred * inverse])
    backward = torch.ops.aten.native_batch_norm_backward
    _, by_weight, by_bias = backward(
        _wide(gradient),
        _wide(batch),
        None,
        mean,
        _variance(inverse),
        None,
        None,
        False,
        0.0,
        [False, True, True],
    )
    return torch.stack([by_bias, by_weight])


def input_gradient(
    gradient: Tensor,
    batch: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    means: Tensor,
) -> Tensor:
    """Return the gradient of the batch.

    Args:
        gradient: Gradient of the normalised batch.
        batch: The batch.
        mean: Means of all ranks' batches.
        inverse: 1 / √(variance + eps) of all ranks' batches.
        weight: The layer's weight, or None.
        means: 2 × C: ``sums`` over all ranks, divided by the number of values per channel.

    Source:
        Ioffe and Szegedy, section 3: weight · inverse · (gradient - mean of it - x̂ · mean of
        gradient · x̂).
    """
    weight = _like(weight, mean)
    factor = inverse if weight is None else inverse * weight
    if batch.is_cuda:
        # The kernel divides by this count, and the sums are divided already.
        one = torch.ones(1, dtype=torch.int32, device=batch.device)
        centred = means[1] / inverse
        return torch.batch_norm_backward_elemt(
            gradient, batch, mean, inverse, weight, means[0].contiguous(), centred, one
        )
    x, dy = _wide(batch), _wide(gradient)
    found = _normalised(x, -means[1] * factor, -means[0] * factor, mean, inverse)
    shape = (1, -1, *[1] * (batch.dim() - 2))
    return found.addcmul_(dy, factor.view(shape)).to(batch.dtype)


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor
) -> Tensor:
    # Below functional.batch_norm, which refuses an eps of 0 in torch 2.11; the variance has it.
    variance = _variance(inverse)
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, 0.0, False)


def _variance(inverse: Tensor) -> Tensor:
    return inverse.square().reciprocal_()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _like(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(other.dtype)
