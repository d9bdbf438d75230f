"""PowerSGD under AMP: a gradient that is not finite skips one step on all ranks.

The state keeps its values from before the step.
"""

import itertools

import pytest
import torch

from mpidist.ddp.hooks.default import fp16_compress_wrapper
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.module import DistributedDataParallel
from mpidist.kernels import powersgd
from tests.ddp.hooks.test_powersgd import bucket_of, state_of
from tests.kernels.conftest import use_cuda_text_on_the_cpu
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]

OVERFLOW = 4


def train(group, hook, bad=None, feedback=True, cap=None):
    """Train under a GradScaler; in step 4 rank 0's loss is ``bad``.

    Without ``bad`` the step is omitted and the scale halved.
    """
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=cap)
    state = PowerSGDState(group, 2, start_powerSGD_iter=1, use_error_feedback=feedback)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    generator = torch.Generator().manual_seed(group.rank)
    skipped = []
    for step in range(9):
        x = torch.randn(8, 16, generator=generator)
        if step == OVERFLOW and bad is None:
            scaler.update(new_scale=scaler.get_scale() / 2)
            continue
        optimizer.zero_grad()
        loss = (ddp(x) - x.roll(1, 1)).square().mean()
        if step == OVERFLOW and group.rank == 0:
            loss = loss * bad
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        if step == OVERFLOW:
            skipped += [all(p.grad.isfinite().all() for p in module.parameters())]
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < scale) == (step == OVERFLOW), (
            f"step {step}: scale {scaler.get_scale()} after {scale}"
        )
    return module, state, scaler


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_training_goes_on_as_if_the_step_had_not_been(group, hook, in_thread, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    for feedback in (True, False):
        expected, its_state, _ = train(group, hook, None, feedback)
        for bad in (float("inf"), float("nan")):
            module, state, scaler = train(group, hook, bad, feedback)
            text = f"feedback {feedback} bad {bad}"
            pairs = zip(module.parameters(), expected.parameters(), strict=True)
            agree(
                group,
                all(torch.allclose(a, b, atol=1e-5) for a, b in pairs),
                f"other weights: {text}",
            )
            agree(group, scaler.get_scale() == 512 and state.iter == its_state.iter + 1, text)
            held = [*state.error_dict.values(), *state.q_memory_dict.values()]
            agree(
                group,
                bool(state.q_memory_dict) and all(bool(t.isfinite().all()) for t in held),
                f"not finite: {text}",
            )
            alike = [list(module.state_dict().values()), list(state.q_memory_dict.values())]
            gathered = group.all_gather_object(alike)
            same = all(
                torch.equal(a, b)
                for other in gathered
                for mine, its in zip(alike, other, strict=True)
                for a, b in zip(mine, its, strict=True)
            )
            agree(group, same, f"ranks differ: {text}")
            errors = state.error_dict.items()
            agree(
                group,
                all(torch.allclose(e, its_state.error_dict[name], atol=1e-3) for name, e in errors),
                f"errors: {text}",
            )


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_several_buckets_and_half_precision(group, hook):
    """Finite buckets complete their step; a gradient beyond fp16's range counts as an overflow."""
    for chosen, cap, bad in itertools.product(
        [hook, fp16_compress_wrapper(hook)], [None, 0.001], [float("inf"), 1e9]
    ):
        if bad == 1e9 and chosen is hook:
            continue
        module, state, _ = train(group, chosen, bad, cap=cap)
        held = [
            *state.error_dict.values(),
            *state.q_memory_dict.values(),
            *module.state_dict().values(),
        ]
        agree(group, all(bool(t.isfinite().all()) for t in held), f"cap {cap} bad {bad}")
        gathered = group.all_gather_object(
            [*module.state_dict().values(), *state.q_memory_dict.values()]
        )
        agree(
            group,
            all(
                torch.equal(a, b)
                for other in gathered
                for a, b in zip(other, gathered[0], strict=True)
            ),
            "ranks differ",
        )


def span_of(q):
    """Return the projection on a Q's columns, which a second orthonormalisation keeps."""
    orthonormal, _ = torch.linalg.qr(q)
    return orthonormal @ orthonormal.t()


@pytest.mark.parametrize("is_text", [False, True])
def test_the_state_of_a_step_that_is_given_up(group, device, is_text, monkeypatch):
    """Twins and CUDA text: errors equal to the bit, gradients NaN on all ranks."""
    if is_text:
        if device.type == "cuda":
            pytest.skip("the text runs on the host; on a device the kernels do")
        use_cuda_text_on_the_cpu(monkeypatch)
    state, bucket = state_of(group, 2), bucket_of(group.rank)
    powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
    before = {name: error.clone() for name, error in state.error_dict.items()}
    spans = {name: span_of(q) for name, q in state.q_memory_dict.items()}
    for last in (0, group.size - 1):
        bucket.flat.copy_(bucket_of(group.rank, seed=1).flat)
        if group.rank == last:
            bucket.views[0][3, 5] = float("-inf")
        powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
        agree(group, bool(bucket.views[0].isnan().all()) and bool(bucket.views[1].isfinite().all()))
        agree(
            group,
            all(torch.equal(error, state.error_dict[name]) for name, error in before.items()),
            "errors changed",
        )
        agree(
            group, set(state.q_memory_dict) == set(spans), f"the Qs of {list(state.q_memory_dict)}"
        )
        kept = {
            name: torch.allclose(span_of(q), spans[name], atol=1e-4)
            for name, q in state.q_memory_dict.items()
        }
        agree(group, all(kept.values()), f"other Qs: {kept}")
    bucket.flat.copy_(bucket_of(group.rank, seed=2).flat)
    given = bucket.views[0].clone()
    powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
    agree(
        group,
        torch.allclose(bucket.views[0] + state.error_dict["a"], given + before["a"], atol=1e-4),
        "the next step",
    )


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_ranks_with_kernels_and_without_give_up_alike(group, hook, monkeypatch):
    """CuPy is missing on one rank alone; all issue the same collectives and keep the same Qs."""
    if group.rank == 0:
        use_cuda_text_on_the_cpu(monkeypatch)
    make = powersgd.Bucket.__init__

    def on_cuda(bucket, *args):
        make(bucket, *args)
        bucket.device = torch.device("cuda", 0)

    monkeypatch.setattr(powersgd.Bucket, "__init__", on_cuda)
    calls = []
    call = group.all_reduce
    monkeypatch.setattr(
        group, "all_reduce", lambda *args, **kwargs: (calls.append(args), call(*args, **kwargs))[1]
    )
    state = state_of(group, 2)
    for step in range(4):
        bucket = bucket_of(group.rank, ("a", "conv", "c"), seed=step)
        if step == 1 and group.rank == group.size - 1:
            bucket.views[0][3, 5] = float("nan")
        count = len(calls)
        hook(state, GradBucket(bucket, 0, True)).wait()
        gathered = group.all_gather_object(len(calls) - count)
        agree(group, gathered == [2] * group.size, f"collectives of step {step}: {gathered}")
        agree(group, bool(bucket.flat.isfinite().all()) == (step != 1), f"step {step}")
        qs = group.all_gather_object(state.q_memory_dict)
        same = all(
            torch.allclose(q, its[name], atol=1e-4) for its in qs for name, q in qs[0].items()
        )
        agree(group, bool(qs[0]) and same, f"Qs of step {step}")


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_an_error_that_is_not_finite_heals(group, hook):
    """X − M overflows on one rank, or a state of an older run holds such an error."""
    state = state_of(group, 2)
    for step in range(3):
        bucket = bucket_of(group.rank, ("a", "conv", "c"), seed=step)
        hook(state, GradBucket(bucket, 0, True)).wait()
        agree(group, bool(bucket.flat.isfinite().all()) == (step != 1), f"step {step}")
        if step == 0 and group.rank == 0:
            state.error_dict["a"][1, 2] = float("inf")
    agree(group, all(bool(error.isfinite().all()) for error in state.error_dict.values()))
