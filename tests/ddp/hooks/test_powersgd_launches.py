"""Launches and collectives of PowerSGD per bucket, with the CUDA text run on the CPU."""

import pytest
import torch

from mpidist.ddp.hooks import lowrank
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.powersgd import powerSGD_hook
from tests.ddp.hooks.test_powersgd import bucket_of, state_of
from tests.kernels.conftest import use_cuda_text_on_the_cpu
from tests.tools.support import agree


@pytest.mark.mpi
def test_a_bucket_takes_two_collectives_and_five_launches(group, monkeypatch):
    """The CUDA text on the CPU takes a GPU's launches and gives torch's results."""
    twin, text = state_of(group, 2), state_of(group, 2)
    wanted = [bucket_of(group.rank, seed=step) for step in range(3)]
    for bucket in wanted:
        powerSGD_hook(twin, GradBucket(bucket, 0, True)).wait()
    launched = use_cuda_text_on_the_cpu(monkeypatch)
    sent = []
    call = group.all_reduce
    monkeypatch.setattr(
        group, "all_reduce", lambda *args, **kwargs: (sent.append(args), call(*args, **kwargs))[1]
    )
    bucket = bucket_of(group.rank)
    for step in range(3):
        bucket.flat.copy_(bucket_of(group.rank, seed=step).flat)
        powerSGD_hook(text, GradBucket(bucket, 0, True)).wait()
        agree(group, torch.allclose(bucket.flat, wanted[step].flat, atol=1e-4), f"step {step}")
        agree(
            group,
            len(launched) == 5 * (step + 1) and len(sent) == 2 * (step + 1),
            f"{launched} {len(sent)}",
        )
    for name, error in twin.error_dict.items():
        agree(group, torch.allclose(error, text.error_dict[name], atol=1e-4), name)


@pytest.mark.mpi
def test_buckets_are_collected_and_handed_back_in_one_launch(group, monkeypatch):
    launched = use_cuda_text_on_the_cpu(monkeypatch)
    bucket = bucket_of(group.rank)
    given = [view.clone() for view in bucket.views]
    for parameter, gradient in zip(bucket.parameters, given, strict=True):
        parameter.grad = gradient
    bucket.flat.zero_()
    bucket._collect_together(as_views=False)
    agree(group, launched == ["pack_float_float"], str(launched))
    agree(group, all(torch.equal(a, b) for a, b in zip(bucket.views, given, strict=True)))
    bucket.flat.mul_(2)
    bucket.hand_back([True] * len(given), as_views=False)
    agree(
        group,
        launched[1:] == ["unpack_float_float"] and bool((given[0] == bucket.views[0]).all()),
        str(launched),
    )
    # torch copies if a gradient is missing, because the kernel copies whole buckets.
    bucket.parameters[0].grad = None
    bucket._collect_together(as_views=True)
    agree(
        group,
        len(launched) == 2 and not bucket.views[0].any() and bucket.parameters[0].grad is None,
    )
    agree(
        group,
        all(p.grad is v for p, v in zip(bucket.parameters[1:], bucket.views[1:], strict=True)),
    )


@pytest.mark.mpi
def test_a_buckets_layout_is_looked_at_once(group, monkeypatch):
    """Later steps read neither parameters nor gradients; another bucket has a layout of its own."""
    state, bucket = state_of(group, 2), bucket_of(group.rank)
    powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
    placed = []
    place = lowrank.place
    monkeypatch.setattr(lowrank, "place", lambda *args: (placed.append(args), place(*args))[1])
    with monkeypatch.context() as patches:
        for name in ("parameters", "gradients"):
            patches.setattr(GradBucket, name, lambda bucket: pytest.fail("asked again"))
        for step in range(2):
            bucket.flat.copy_(bucket_of(group.rank, seed=step).flat)
            powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
    agree(group, not placed)
    powerSGD_hook(state, GradBucket(bucket_of(group.rank, channels_last=True), 0, True)).wait()
    agree(group, len(placed) == 1, str(len(placed)))
