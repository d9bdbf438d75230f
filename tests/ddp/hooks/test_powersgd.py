"""PowerSGD: approximation + error = input, and full rank is the plain average.

All ranks hold the same weights; volumes are those of the paper.
"""

import gc

import pytest
import torch

from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.diloco import DiLoCo
from mpidist.ddp.hooks.adaptive import adaptive_hook
from mpidist.ddp.hooks.adaptive_state import AdaptiveState
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.usefixtures("device")

SHAPES = {
    "a": (12, 20),
    "b": (12,),
    "conv": (8, 3, 5, 5),
    "c": (12, 20),
    "empty": (0, 4),
    "scalar": (),
}


def bucket_of(rank, names=tuple(SHAPES), seed=0, channels_last=False):
    parameters = [torch.nn.Parameter(torch.zeros(SHAPES[name])) for name in names]
    if channels_last:
        parameters = [
            torch.nn.Parameter(p.detach().to(memory_format=torch.channels_last))
            if p.dim() == 4
            else p
            for p in parameters
        ]
    bucket = Bucket(range(len(names)), parameters, names)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    for view in bucket.views:
        view.copy_(torch.randn(view.shape, generator=generator))
    return bucket


def mean_of(group, tensors):
    means = [t.clone() for t in tensors]
    for tensor in means:
        group.all_reduce(tensor, "avg")
    return means


def state_of(group, rank, **options):
    return PowerSGDState(group, rank, start_powerSGD_iter=0, min_compression_rate=1, **options)


@pytest.mark.mpi
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
@pytest.mark.parametrize("in_thread", [False, True])
def test_approximation_and_error_add_up_to_the_input(group, hook, in_thread, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    state = state_of(group, 2)
    names = ("a", "conv", "c")
    for step in range(3):
        bucket = bucket_of(group.rank, names, step)
        flat = bucket.flat.clone()
        before = {name: error.clone() for name, error in state.error_dict.items()}
        result = hook(state, GradBucket(bucket, 0, True)).wait()
        for name, view in zip(names, bucket.views, strict=True):
            start = view.storage_offset()
            m = (
                flat[start : start + view.numel()] + before.get(name, torch.zeros(1)).flatten()
            ).view_as(view)
            agree(
                group,
                torch.allclose(view + state.error_dict[name].view_as(view), m, atol=1e-5),
                f"{name} step {step}",
            )
        gathered = group.all_gather_object(result)
        agree(group, all(torch.equal(other, gathered[0]) for other in gathered), "ranks differ")


@pytest.mark.mpi
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("epsilon", [0, 1e-8])
def test_full_rank_is_the_plain_average(group, batch, channels_last, epsilon):
    # Exact only if the column spaces of all ranks together have at most r dimensions, so r = n.
    state = PowerSGDState(
        group,
        12,
        0,
        min_compression_rate=0.1,
        batch_tensors_with_same_shape=batch,
        orthogonalization_epsilon=epsilon,
    )
    bucket = bucket_of(group.rank, channels_last=channels_last)
    expected = mean_of(group, [view.contiguous() for view in bucket.views])
    powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
    pairs = zip(bucket.views, expected, strict=True)
    agree(group, all(torch.allclose(a, b, atol=2e-4) for a, b in pairs), "differs from the average")
    agree(group, set(state.error_dict) == {"a", "conv", "c"}, str(set(state.error_dict)))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
@pytest.mark.parametrize("epsilon", [0, 1e-8])
def test_a_rank_above_the_gradients_own_leaves_no_error(group, hook, epsilon):
    """Of the mean, that is: each rank adds one dimension to it."""
    state = state_of(group, group.size + 4, orthogonalization_epsilon=epsilon)
    for step in range(3):
        parameter = torch.nn.Parameter(torch.zeros(24, 24))
        bucket = Bucket([0], [parameter], ["weight"])
        generator = torch.Generator().manual_seed(100 * step + group.rank)
        one, other = torch.randn(2, 24, generator=generator)
        bucket.views[0].copy_(torch.outer(one, other))
        (expected,) = mean_of(group, bucket.views)
        hook(state, GradBucket(bucket, 0, True)).wait()
        far = float((bucket.views[0] - expected).abs().max())
        agree(group, far < 1e-4, f"step {step}: {far}")


@pytest.mark.mpi
def test_batching_changes_no_result(group):
    results = []
    for batch in (False, True):
        state = state_of(group, 2, batch_tensors_with_same_shape=batch)
        bucket = bucket_of(group.rank)
        powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
        results.append(bucket.flat)
    agree(group, torch.allclose(*results, atol=1e-5))


@pytest.mark.mpi
def test_errors_and_factors_are_kept_by_parameter_names(group):
    kept, moved = state_of(group, 2), state_of(group, 2)
    names = ("a", "conv", "c")
    for step in range(3):
        one = bucket_of(group.rank, names, step)
        powerSGD_hook(kept, GradBucket(one, 0, True)).wait()
        parts = {
            name: view.clone()
            for name, view in zip(names, bucket_of(group.rank, names, step).views, strict=True)
        }
        for index, chosen in enumerate([("c", "a"), ("conv",)] if step else [names]):
            bucket = Bucket(
                range(len(chosen)),
                [torch.nn.Parameter(torch.zeros(SHAPES[n])) for n in chosen],
                chosen,
            )
            for name, view in zip(chosen, bucket.views, strict=True):
                view.copy_(parts[name])
            powerSGD_hook(moved, GradBucket(bucket, index, index == (1 if step else 0))).wait()
            for name, view in zip(chosen, bucket.views, strict=True):
                agree(
                    group,
                    torch.allclose(view, one.views[names.index(name)], atol=1e-5),
                    f"{name} step {step}",
                )


@pytest.mark.mpi
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
@pytest.mark.parametrize("in_thread", [False, True])
def test_training_with_powersgd_learns_and_keeps_ranks_equal(group, hook, in_thread, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.001)
    state = PowerSGDState(group, 2, start_powerSGD_iter=3)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(group.rank)
    losses = []
    for _ in range(60):
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gathered = group.all_gather_object([p.detach() for p in module.parameters()])
    agree(
        group,
        all(
            torch.equal(a, b) for other in gathered for a, b in zip(other, gathered[0], strict=True)
        ),
        "ranks differ",
    )
    agree(group, losses[-1] < 0.7 * losses[0], str(losses[::10]))
    agree(
        group,
        state.iter == 60 and state.compression_stats()[0] > 1.5,
        str(state.compression_stats()),
    )


@pytest.mark.mpi
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_the_statistics_are_what_is_sent(group, hook, in_thread, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    sent = []

    def spy(name):
        call = getattr(group, name)

        def counted(what, *args, **kwargs):
            tensors = what if isinstance(what, list) else [what]
            sent.append(sum(t.numel() for t in tensors))
            return call(what, *args, **kwargs)

        return counted

    for name in ("all_reduce", "all_reduce_coalesced"):
        monkeypatch.setattr(group, name, spy(name))
    state = state_of(group, 2)
    before = 0
    for step in range(3):
        bucket = bucket_of(group.rank, seed=step)
        hook(state, GradBucket(bucket, 0, True)).wait()
        before += bucket.flat.numel()
    agree(
        group,
        state.compression_stats() == (before / sum(sent), before, sum(sent)),
        f"{state.compression_stats()} {sent}",
    )
    agree(group, sum(sent) < before / 1.5)


@pytest.mark.mpi
def test_a_transposed_parameter_is_compressed_as_its_transpose(group):
    parameter = torch.nn.Parameter(torch.zeros(20, 12).t())
    bucket = Bucket([0], [parameter], ["turned"])
    state = state_of(group, 2)
    for step in range(2):
        given = torch.randn(12, 20, generator=torch.Generator().manual_seed(10 * step + group.rank))
        before = state.error_dict.get("turned", torch.zeros(1)).clone()
        bucket.views[0].copy_(given)
        powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
        agree(
            group,
            torch.allclose(bucket.views[0] + state.error_dict["turned"], given + before, atol=1e-5),
            f"step {step}",
        )
    agree(
        group,
        state.q_memory_dict["turned"].shape == (12, 2) and bucket.views[0].stride() == (1, 12),
    )


@pytest.mark.mpi
def test_a_later_step_keeps_its_cache_and_factors(group):
    state = state_of(group, 2)
    bucket = bucket_of(group.rank)
    powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
    kept, q = dict(state._cache), dict(state.q_memory_dict)
    powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
    agree(group, state._cache == kept and all(state.q_memory_dict[name] is q[name] for name in q))
    state.error_dict["a"] = torch.ones(SHAPES["a"])  # as if loaded from a file
    view = bucket.views[0]
    given = view.clone()
    powerSGD_hook(state, GradBucket(bucket, 0, True)).wait()
    agree(group, torch.allclose(view + state.error_dict["a"], given + 1, atol=1e-5))


@pytest.mark.mpi
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_complex_gradients_are_averaged(group, hook):
    parameter = torch.nn.Parameter(torch.zeros(20, 30, dtype=torch.complex64))
    bucket = Bucket([0], [parameter], ["a"])
    bucket.flat.copy_(torch.complex(torch.randn(600), torch.randn(600)) + group.rank)
    (expected,) = mean_of(group, [bucket.flat])
    hook(state_of(group, 1), GradBucket(bucket, 0, True)).wait()
    agree(group, torch.allclose(bucket.flat, expected, atol=1e-5))


@pytest.mark.mpi
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_an_error_goes_on_in_another_layout(group, hook):
    """The error of a channels-last model is added to the same elements of a contiguous one."""
    state, names = state_of(group, 2), ("conv",)
    hook(state, GradBucket(bucket_of(group.rank, names, channels_last=True), 0, True)).wait()
    before = state.error_dict["conv"].clone()
    agree(
        group, before.shape == SHAPES["conv"] and not before.is_contiguous() and bool(before.any())
    )
    bucket = bucket_of(group.rank, names, 1)
    given = bucket.views[0].clone()
    hook(state, GradBucket(bucket, 0, True)).wait()
    agree(
        group, torch.allclose(bucket.views[0] + state.error_dict["conv"], given + before, atol=1e-5)
    )


RESNET18 = [(64, 3, 7, 7)]
for width, before in ((64, 64), (128, 64), (256, 128), (512, 256)):
    RESNET18 += [
        (width, before, 3, 3),
        (width, width, 3, 3),
        (width, width, 3, 3),
        (width, width, 3, 3),
    ]
    if width != before:
        RESNET18.append((width, before, 1, 1))


@pytest.mark.parametrize(("rank", "rate"), [(1, 243), (2, 136), (4, 72)])
def test_volume_on_resnet18(rank, rate):
    """arXiv 1905.13727, table 3: ResNet-18 for CIFAR, 10 classes, batch norms uncompressed."""
    matrices = [
        (64, 3 * 3 * 3),
        *[(s[0], torch.Size(s[1:]).numel()) for s in RESNET18[1:]],
        (10, 512),
    ]
    vectors = 2 * (64 + sum(s[0] for s in RESNET18[1:])) + 10
    before = vectors + sum(n * m for n, m in matrices)
    after = vectors + sum(min(n * m, (n + m) * min(n, m, rank)) for n, m in matrices)
    assert round(before / after) == pytest.approx(rate, rel=0.03)


def state_of_kind(kind, group):
    return PowerSGDState(group) if kind == "powersgd" else AdaptiveState(group)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["powersgd", "adaptive"])
def test_a_second_module_of_equal_names_needs_a_state_of_its_own(group, kind):
    hook = powerSGD_hook if kind == "powersgd" else adaptive_hook
    state = state_of_kind(kind, group)

    def wrapped(module):
        return DistributedDataParallel(module, process_group=group)

    net = torch.nn.Linear(4, 3)
    first, second = wrapped(net), wrapped(torch.nn.Linear(4, 3))
    first.register_comm_hook(state, hook)
    raises_on_all(
        group,
        ValueError,
        lambda: second.register_comm_hook(state, hook),
        "serves another module already, whose 'weight'",
    )
    inner = torch.optim.SGD(second.module.parameters(), lr=0.1)
    raises_on_all(
        group,
        ValueError,
        lambda: DiLoCo(second.module, inner, every=2, hook=hook, state=state, process_group=group),
        "serves another module already",
    )
    # Of one module as often as wanted, of others by other names, or in the place of a former one.
    wrapped(net).register_comm_hook(state, hook)
    wrapped(torch.nn.Sequential(torch.nn.Linear(4, 3))).register_comm_hook(state, hook)
    second.register_comm_hook(state_of_kind(kind, group), hook)
    del first, net
    gc.collect()
    second.register_comm_hook(state, hook)
