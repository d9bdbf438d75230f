"""The adaptive hook: numbers of the fixed hooks, nothing lost, one decision on all ranks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.hooks.adaptive import adaptive_hook
from mpidist.ddp.hooks.adaptive_state import AdaptiveState
from mpidist.ddp.hooks.default import allreduce_hook, bf16_compress_hook
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.powersgd import powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.hooks.quantization import quantization_perchannel_hook
from mpidist.ddp.module import DistributedDataParallel
from tests.ddp.hooks.test_powersgd import bucket_of, mean_of
from tests.tools.simulated_nodes import groups
from tests.tools.support import agree

pytestmark = pytest.mark.mpi

METHODS = ("none", "bf16", "uint8", "powersgd-2", "powersgd-4")
NAMES = ("a", "b", "conv", "c")


@pytest.fixture
def between_nodes(group, monkeypatch):
    """Have the hook decide, as between nodes of one rank each."""
    monkeypatch.setattr(type(group), "is_single_node", False)


def state_of(group, **options):
    return AdaptiveState(group, METHODS, min_compression_rate=1, **options)


def decide(state, method, names=NAMES):
    state.schedule.resume({names: method}, None)


def reduced(state, bucket):
    return adaptive_hook(state, GradBucket(bucket, 0, True)).wait()


def same_on_all(group, tensor):
    return all(torch.equal(tensor, other) for other in group.all_gather_object(tensor))


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("between_nodes")
def test_a_decided_bucket_has_the_bits_of_the_fixed_hook(group):
    fixed = {
        "none": (group, allreduce_hook),
        "bf16": (group, bf16_compress_hook),
        "uint8": (group, quantization_perchannel_hook),
        "powersgd-2": (PowerSGDState(group, 2, 0, min_compression_rate=1), powerSGD_hook),
    }
    for method, (its_state, hook) in fixed.items():
        state = state_of(group)
        decide(state, method)
        for step in range(4):
            bucket, its = (bucket_of(group.rank, NAMES, step) for _ in range(2))
            found = reduced(state, bucket)
            hook(its_state, GradBucket(its, 0, True)).wait()
            agree(group, torch.equal(found, its.flat), f"{method} step {step}")
        (row,) = state.table()
        agree(group, row.method == method and row.numel == bucket.flat.numel(), str(row))
        agree(group, (row.sent_bytes < bucket.flat.nbytes) == (method != "none"), str(row))
        agree(group, method in str(state) and "a - c" in str(state), str(state))


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("between_nodes")
@pytest.mark.parametrize("after", ["none", "bf16", "uint8", "powersgd-4"])
def test_nothing_is_lost_when_the_method_changes(group, after):
    state, given, got = state_of(group), 0.0, 0.0
    decide(state, "powersgd-2")
    for step in range(7):
        bucket = bucket_of(group.rank, NAMES, step)
        (mean,) = mean_of(group, [bucket.flat])
        if step == 4:
            agree(group, set(state.error_dict) == {"a", "conv", "c"}, str(set(state.error_dict)))
            decide(state, after)
        if step == 5 and after in ("none", "bf16"):
            # The step of the change was not finite: the errors are for the next one.
            agree(group, set(state.error_dict) == {"a", "conv", "c"}, str(set(state.error_dict)))
        is_bad = step == 4 and after in ("none", "bf16")
        if is_bad and group.rank == 0:
            bucket.flat[3] = float("nan")
        found = reduced(state, bucket)
        agree(group, bool(found.isnan().any()) == is_bad, f"step {step}")
        if not is_bad:
            given, got = given + mean, got + found
    left = torch.zeros_like(bucket.flat)
    for name, view in zip(NAMES, bucket.views, strict=True):
        if name in state.error_dict:
            start = view.storage_offset()
            left[start : start + view.numel()] = state.error_dict[name].flatten()
    (left,) = mean_of(group, [left])
    agree(group, bool(state.error_dict) == after.startswith("powersgd"), str(state.error_dict))
    atol = {"bf16": 0.1, "uint8": 0.2}.get(after, 1e-4)
    far = float((given - got - left).abs().max())
    agree(group, far < atol, f"{far} is lost")


@pytest.mark.usefixtures("between_nodes")
@pytest.mark.parametrize("kind", [DistributedDataParallel, TorchDDP])
def test_ranks_decide_alike_though_one_is_late(group, kind, request):
    if kind is TorchDDP:
        request.getfixturevalue("default_group")
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16, bias=False)
    )
    model = kind(
        net,
        process_group=group if kind is DistributedDataParallel else None,
        bucket_cap_mb=0.004,
    )
    state = AdaptiveState(
        group if kind is DistributedDataParallel else None,
        ("none", "bf16", "powersgd-2"),
        check_interval=2,
        change=0.0,
    )
    model.register_comm_hook(state, adaptive_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(group.rank)
    tables, losses, decided = [], [], []
    for step in range(60):
        x = torch.randn(8, 16, generator=generator)
        if group.rank == 0 and step % 5 == 0:
            time.sleep(0.003)
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        tables.append(state.schedule.table)
        losses.append(loss.item())
        decided.append(state.is_decided)
    agree(group, len(set(map(str, group.all_gather_object(tables)))) == 1, str(tables))
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    agree(group, same_on_all(group, flat), "weights differ")
    agree(group, losses[-1] < 0.8 * losses[0] and state.iter == 60, f"{losses[::10]} {state.iter}")
    if group.size > 1:
        agree(group, {"bf16", "powersgd-2"} <= {name for table in tables for name in table})
        # It decides, looks at the steps' length, and tries again: no two are the same.
        changes = sum(a != b for a, b in itertools.pairwise(decided))
        agree(group, changes >= 2, str(decided))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_node_averages_exactly(group, dtype):
    state = AdaptiveState(group)
    assert state.is_decided and state.means is None
    for step in range(2):
        bucket = Bucket([0], [torch.nn.Parameter(torch.zeros(6, 8, dtype=dtype))], ["a"])
        bucket.flat.copy_(torch.randn(48) + group.rank + step)
        its = bucket.flat.clone()
        group.all_reduce(its, "avg")
        agree(group, torch.equal(reduced(state, bucket), its))
    (row,) = state.table()
    agree(group, (row.method, row.measured_s) == ("none", {}), str(row))
    state.close()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("layout", ["blocks", "uneven"])
def test_several_ranks_a_node(world, monkeypatch, layout):
    """Nothing is lost; PowerSGD has the bits of the fixed hook, of each rank's own gradient."""
    with groups(world, monkeypatch) as on:
        group = on(layout)
        state = state_of(group)
        assert state.means is not None
        fixed = PowerSGDState(group, 2, 0, min_compression_rate=1)
        for method in METHODS:
            for step in range(2):
                decide(state, method)
                # It seeds the first Q.
                fixed.iter = state.iter
                bucket, its = (bucket_of(group.rank, NAMES, step) for _ in range(2))
                before = errors_of(group, state, bucket)
                (wanted,) = mean_of(group, [bucket.flat])
                found = reduced(state, bucket).clone()
                after = errors_of(group, state, bucket)
                far = float((found + after - wanted - before).abs().max())
                atol = {"bf16": 0.1, "uint8": 0.1}.get(method, 1e-4)
                agree(world, far < atol, f"{layout} {method}: {far}")
                agree(world, same_on_all(world, found), f"{layout} {method}: ranks differ")
                if method == "powersgd-2":
                    powerSGD_hook(fixed, GradBucket(its, 0, True)).wait()
                    agree(world, torch.equal(found, its.flat), f"{layout}: not the fixed hook's")
            agree(world, bool(state.error_dict) == method.startswith("powersgd"), method)
        # As from a file of ranks on nodes of their own: each rank has an error of its own.
        saved = state.state_dict()
        for error in saved["powersgd"]["error_dict"].values():
            error.add_(group.rank)
        state.load_state_dict(saved)
        decide(state, "powersgd-4")
        bucket = bucket_of(group.rank, NAMES, 5)
        before = errors_of(group, state, bucket)
        (wanted,) = mean_of(group, [bucket.flat])
        found = reduced(state, bucket).clone()
        far = float((found + errors_of(group, state, bucket) - wanted - before).abs().max())
        agree(world, far < 1e-4, f"after a load: {far}")
        state.close()


def errors_of(group, state, bucket):
    """Return the mean of all ranks' errors, in the place of their gradients."""
    flat = torch.zeros_like(bucket.flat)
    for name, view in zip(NAMES, bucket.views, strict=True):
        if name in state.error_dict:
            start = view.storage_offset()
            flat[start : start + view.numel()] = state.error_dict[name].flatten()
    group.all_reduce(flat, "avg")
    return flat


@pytest.mark.usefixtures("between_nodes")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes(group, dtype):
    for method in METHODS:
        state = state_of(group)
        decide(state, method, ("a",))
        for step in range(2):
            bucket = Bucket([0], [torch.nn.Parameter(torch.zeros(24, 30, dtype=dtype))], ["a"])
            bucket.flat.copy_(torch.outer(torch.arange(24.0), torch.ones(30)).flatten() / 24 + step)
            its = bucket.flat.clone()
            found = reduced(state, bucket)
            agree(group, torch.allclose(found, its, atol=0.02), f"{dtype} {method} step {step}")
        if dtype is torch.complex64 or method == "bf16":
            agree(group, state.table()[0].method == "none")


@pytest.mark.usefixtures("between_nodes")
@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_finite(group, method):
    """As the fixed hooks: NaN on all ranks, and the next step is as if this one had not been."""
    state = state_of(group)
    decide(state, method)
    for step in range(4):
        bucket = bucket_of(group.rank, NAMES, step)
        if step == 2 and group.rank == 0:
            bucket.flat[7] = float("nan")
        found = reduced(state, bucket)
        agree(group, bool(found.isfinite().all()) == (step != 2), f"step {step}")
    agree(group, all(bool(error.isfinite().all()) for error in state.error_dict.values()))


@pytest.mark.usefixtures("between_nodes")
def test_sparse_gradients_go_past_the_hook(group):
    net = torch.nn.Sequential(
        torch.nn.Embedding(8, 16, sparse=True), torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)
    )
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.001)
    state = AdaptiveState(group, ("none", "powersgd-1"), min_compression_rate=1)
    model.register_comm_hook(state, adaptive_hook)
    for _ in range(24):
        model.zero_grad()
        model(torch.tensor([group.rank % 8, 3])).sum().backward()
    agree(group, state.iter == 24 and state.is_decided, f"{state.iter} {state}")
    agree(group, net[0].weight.grad.is_sparse)
    agree(group, all("0.weight" not in row.parameters for row in state.table()), str(state))
