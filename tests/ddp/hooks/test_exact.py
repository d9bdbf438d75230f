"""Exact averages: the same bits on any number of ranks, for the same micro-batches."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from mpidist import ddp
from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.hooks import exact, exact_sums
from mpidist.ddp.hooks.exact import ExactAverage, exact_average_hook
from mpidist.ddp.hooks.exact_sums import ExactSum
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.optim import OSS
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi

MICRO_BATCHES = 12


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 150), torch.nn.Tanh(), torch.nn.Linear(150, 40), torch.nn.Linear(40, 3)
    )


def batch(step, number):
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(4, 40, generator=generator) * 3.0 ** (number % 5)


def loss_of(model, step, number):
    return model(batch(step, number)).pow(2).sum(1).mean()


def trained(group, is_exact=True, steps=3, make=lambda p: torch.optim.Adam(p, 1e-2), order=1):
    """Train on the same micro-batches of each step, divided among the ranks; return the weights."""
    model = network()
    wrapped = ddp.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=0.01, exact_average=is_exact
    )
    optimizer = make(model.parameters())
    own = list(range(MICRO_BATCHES))[group.rank :: group.size][::order]
    for step in range(steps):
        for place, number in enumerate(own):
            is_last = place == len(own) - 1
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                loss_of(wrapped, step, number).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())


def alone(steps=3, make=lambda p: torch.optim.Adam(p, 1e-2)):
    """Train in this process, by exact sums of the micro-batches in reverse order."""
    model = network()
    optimizer = make(model.parameters())
    for step in range(steps):
        sums: dict[int, ExactSum] = {}
        for number in reversed(range(MICRO_BATCHES)):
            model.zero_grad()
            loss_of(model, step, number).backward()
            for place, weight in enumerate(model.parameters()):
                if place in sums:
                    sums[place].add(weight.grad.view(-1))
                else:
                    sums[place] = ExactSum.of(weight.grad.view(-1))
        for place, weight in enumerate(model.parameters()):
            mean = (sums[place].high + sums[place].low) / MICRO_BATCHES
            weight.grad = mean.float().view(-1)[: weight.numel()].view_as(weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())


def test_weights_are_those_of_one_process(group):
    agree(group, trained(group) == alone())


def test_groups_of_all_sizes_have_the_same_bits_and_plain_averages_have_not(world):
    found, plain = set(), set()
    for size in range(1, world.size + 1):
        if MICRO_BATCHES % size:
            continue
        group = world.new_group(range(size))
        if world.rank < size:
            found |= {trained(group), trained(group, order=-1)}
            plain.add(trained(group, is_exact=False))
            group.close()
        world.barrier()
    everywhere = set().union(*world.all_gather_object(found))
    plain = set().union(*world.all_gather_object(plain))
    agree(world, len(everywhere) == 1, f"{len(everywhere)} results")
    agree(world, len(plain) > 1 or world.size == 1, "plain averages are equal, too")


def test_a_sharded_optimizer_steps_to_the_same_bits(group):
    def sharded(parameters):
        return OSS(list(parameters), torch.optim.Adam, group=group, lr=1e-2)

    agree(group, trained(group, make=sharded) == alone())


def test_half_types_and_frozen_and_unused_parameters(group):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "used": torch.nn.Linear(5, 3, dtype=torch.bfloat16),
            "frozen": torch.nn.Linear(3, 3, dtype=torch.bfloat16).requires_grad_(False),
            "unused": torch.nn.Linear(2, 2),
        }
    )
    model.forward = lambda x: model["frozen"](model["used"](x))
    wrapped = ddp.DistributedDataParallel(
        model, process_group=group, find_unused_parameters=True, exact_average=True
    )
    ok = True
    for _ in range(2):
        wrapped(torch.full((2, 5), group.rank + 1.0, dtype=torch.bfloat16)).sum().backward()
        terms = []
        for rank in range(group.size):
            copy = torch.nn.Linear(5, 3, dtype=torch.bfloat16)
            copy.load_state_dict(model["used"].state_dict())
            model["frozen"](
                copy(torch.full((2, 5), rank + 1.0, dtype=torch.bfloat16))
            ).sum().backward()
            terms.append(copy.weight.grad.double())
        wanted = (sum(terms) / group.size).float().bfloat16()
        ok &= torch.equal(model["used"].weight.grad, wanted) and model["unused"].weight.grad is None
        model.zero_grad()
    agree(group, ok)


class Layers(torch.nn.Module):
    """Layers of which a pass uses those that it names, the second within a checkpoint."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))
        self.hook = None

    def forward(self, x, used):
        for name in used.split():
            layer = getattr(self, name)
            x = checkpoint(layer, x, use_reentrant=True) if name == "second" else layer(x)
            if self.hook is not None and x.requires_grad:
                x.register_hook(self.hook)
        return torch.tanh(x)


def run_pass(model, step, rank, number, used):
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    model(torch.randn(3, 4, generator=generator), used).square().sum().backward()


def run_step(wrapped, group, step, uses):
    """Run a step of ``uses(rank)``; say whether the gradients are the means over all passes."""
    for number, used in enumerate(own := uses(group.rank)):
        with wrapped.no_sync() if number < len(own) - 1 else contextlib.nullcontext():
            run_pass(wrapped, step, group.rank, number, used)
    alone = Layers()
    passes = [(r, *one) for r in range(group.size) for one in enumerate(uses(r))]
    for rank, number, used in passes:
        run_pass(alone, step, rank, number, used)
    is_right = True
    for mine, sums in zip(wrapped.parameters(), alone.parameters(), strict=True):
        if mine.grad is None or sums.grad is None:
            is_right &= mine.grad is sums.grad
        else:
            is_right &= torch.allclose(mine.grad, sums.grad / len(passes), atol=1e-6)
    wrapped.zero_grad()
    return is_right


def test_gradients_that_only_accumulated_passes_have(group):
    wrapped = ddp.DistributedDataParallel(
        Layers(), process_group=group, find_unused_parameters=True, exact_average=True
    )

    def uses(rank):
        return ["first third"] * (1 + rank % 2) + ["first second", "first"]

    agree(group, all([run_step(wrapped, group, step, uses) for step in range(3)]))


def test_passes_are_counted_where_buckets_are_skipped(group):
    wrapped = ddp.DistributedDataParallel(
        Layers(),
        process_group=group,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=1e-5,
        exact_average=True,
    )
    # The third layer's buckets are the first ones.
    steps = [["first"] * count for count in (1, 3, 2, 1)]
    agree(
        group,
        all([run_step(wrapped, group, i, lambda rank, u=u: u) for i, u in enumerate(steps)]),
    )


def test_a_pass_with_a_reentrant_checkpoint_counts_once(group):
    wrapped = ddp.DistributedDataParallel(
        Layers(), process_group=group, find_unused_parameters=True, exact_average=True
    )
    uses = ["first second"] * 3
    agree(group, all([run_step(wrapped, group, step, lambda rank: uses) for step in range(3)]))


@pytest.mark.parametrize("is_averaged", [False, True])
def test_an_exception_in_a_pass_drops_what_was_accumulated(group, is_averaged):
    model = Layers()
    wrapped = ddp.DistributedDataParallel(
        model, process_group=group, find_unused_parameters=True, exact_average=True
    )

    def interrupt(gradient):
        raise KeyError("interrupted")

    with wrapped.no_sync():
        run_pass(wrapped, 9, group.rank, 0, "first third")
    with contextlib.nullcontext() if is_averaged else wrapped.no_sync():
        model.hook = interrupt
        with pytest.raises(KeyError, match="interrupted"):
            run_pass(wrapped, 9, group.rank, 1, "first third")
    model.hook = None
    wrapped.zero_grad()
    uses = ["first third"] * 3
    with pytest.warns(UserWarning, match="interrupted by an exception"):
        is_right = run_step(wrapped, group, 0, lambda rank: uses)
    agree(group, is_right and run_step(wrapped, group, 1, lambda rank: uses))


def test_a_new_reducer_has_sums_of_its_own(group):
    wrapped = ddp.DistributedDataParallel(Layers(), process_group=group, exact_average=True)
    uses = ["first second third"] * 3
    is_right = run_step(wrapped, group, 0, lambda rank: uses)
    wrapped._set_static_graph()
    agree(group, is_right and run_step(wrapped, group, 1, lambda rank: uses))


def test_the_setting_of_the_job_is_the_default(group, monkeypatch):
    monkeypatch.setenv("MPIDIST_DETERMINISTIC", "exact")
    by_setting = ddp.DistributedDataParallel(network(), process_group=group)
    by_argument = ddp.DistributedDataParallel(network(), process_group=group, exact_average=False)
    agree(group, by_setting.reducer.hook is not None and by_argument.reducer.hook is None)


def test_what_cannot_be_exact_is_refused_on_all_ranks(group, monkeypatch):
    def wrap(module, **options):
        return ddp.DistributedDataParallel(
            module, process_group=group, exact_average=True, **options
        )

    raises_on_all(
        group, ValueError, lambda: wrap(torch.nn.Linear(2, 2, dtype=torch.float64)), "float64"
    )
    raises_on_all(group, ValueError, lambda: wrap(torch.nn.Embedding(4, 2, sparse=True)), "sparse")
    stepping = torch.nn.Linear(2, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    raises_on_all(group, ValueError, lambda: wrap(stepping), "step in the backward pass")
    wrapped = wrap(torch.nn.Linear(2, 1))
    raises_on_all(
        group, ValueError, lambda: wrapped.register_comm_hook(None, ddp.bf16_compress_hook), "round"
    )
    monkeypatch.setattr(exact, "MOST_TERMS", group.size - 1)
    raises_on_all(
        group, ValueError, lambda: wrapped(torch.ones(1, 2)).sum().backward(), "adds at most"
    )


def test_infinities_reach_all_ranks(group):
    """A GradScaler must see them."""
    model = torch.nn.Linear(3, 1, bias=False)
    wrapped = ddp.DistributedDataParallel(model, process_group=group, exact_average=True)
    scale = float("inf") if group.rank == group.size - 1 else 1.0
    wrapped(torch.tensor([[scale, 1.0, 2.0]])).sum().backward()
    gradient = model.weight.grad.view(-1)
    agree(group, gradient[1:].tolist() == [1.0, 2.0] and bool(gradient[0].isinf()))


def bucket_of(group, dtype, sizes, prepare):
    """Return a bucket of gradients that differ by rank and element; one is channels last."""
    shapes = [(size,) for size in sizes] + [(3, 5, 30, 20)]
    parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
    parameters[-1].data = parameters[-1].data.contiguous(memory_format=torch.channels_last)
    made = Bucket(range(len(shapes)), parameters, [f"p{n}" for n in range(len(shapes))])
    generator = torch.Generator().manual_seed(group.rank)
    numel = made.flat.numel()
    tens = torch.randint(-20, 8, (numel,), generator=generator)
    made.flat.copy_(torch.randn(numel, generator=generator) * 2.0**tens)
    prepare(made.flat)
    return GradBucket(made, 0, True, group)


@pytest.mark.parametrize("sizes", [(1,), (5, 4096, 3), (9000, 11, 2)])
def test_gradients_sent_as_they_are_have_the_bits_of_sums(group, sizes, monkeypatch):
    """All ways for one term of each rank, whatever their shares, layouts and values."""

    def cancelling(flat):
        flat.copy_(torch.linspace(-1, 1, flat.numel()) * (-1) ** group.rank)

    def extreme(flat):
        flat[::2] *= 2.0**-120
        flat[-2500:] = 0

    def infinite(flat):
        if group.rank == group.size - 1:
            flat[3], flat[50] = float("inf"), float("nan")

    wrong = []
    for prepare in (lambda flat: None, cancelling, extreme, torch.Tensor.zero_, infinite):
        for dtype in (torch.float32, torch.bfloat16):
            results = []
            for short_bytes, are_terms in itertools.product((0, 1 << 30), (True, False)):
                monkeypatch.setattr(exact, "_SHORT_BYTES", short_bytes)
                state = ExactAverage([], lambda: True)
                bucket = bucket_of(group, dtype, sizes, prepare)
                state.begin(group)
                if not state.are_terms:
                    wrong.append("sums where none are held")
                state.are_terms = are_terms
                exact._BucketAverage(state, group, bucket).run()
                results.append(bucket.buffer().clone().nan_to_num_(nan=7.0).view(torch.uint8))
            if not all(torch.equal(results[0], other) for other in results[1:]):
                wrong.append((prepare.__name__, dtype))
    agree(group, not wrong, str(wrong))


def test_accumulated_sums_of_any_kind_have_the_bits_of_one_rank(group, monkeypatch):
    """Totals that are exact and totals that are not, of some ranks, in long and short buckets."""

    def far(flat):
        # What two micro-batches add needs more bits than a float64 has, on the last rank.
        flat[:] = 1.0 + 2.0**-23
        flat[5::7] = 2.0**34

    def infinite(flat):
        flat[1], flat[-1] = float("inf"), float("nan")

    wrong = []
    for prepare, short_bytes in itertools.product((lambda flat: None, far, infinite), (0, 1 << 30)):
        monkeypatch.setattr(exact, "_SHORT_BYTES", short_bytes)
        bucket = bucket_of(group, torch.float32, (5000, 3), lambda flat: None)
        state = ExactAverage([], lambda: True)
        first = [gradient.reshape(-1).clone() for gradient in bucket.gradients()]
        if group.rank == group.size - 1:
            for flat in first:
                prepare(flat)
            state._sums = {
                name: ExactSum.of(flat) for name, flat in zip(bucket.names(), first, strict=True)
            }
            state._own_terms = 1
        own = [gradient.reshape(-1).clone() for gradient in bucket.gradients()]
        state.begin(group)
        exact._BucketAverage(state, group, bucket).run()
        all_own, all_first = group.all_gather_object(own), group.all_gather_object(first)
        for place, gradient in enumerate(bucket.gradients()):
            held = ExactSum.of(all_first[-1][place])
            for terms in all_own:
                held.add(terms[place])
            mean = (held.high + held.low).div(group.size + 1).float().view(-1)
            same = torch.equal(
                gradient.reshape(-1).nan_to_num(nan=7.0),
                mean[: own[place].numel()].nan_to_num(nan=7.0),
            )
            if not same or state.terms != group.size + 1:
                wrong.append((prepare.__name__, short_bytes, place))
    agree(group, not wrong, str(wrong))


def rational_mean(terms):
    """Return the mean of terms of one tensor, by whole numbers of each block's unit."""
    means = []
    for block in torch.stack(terms).split(exact_sums.BLOCK, 1):
        _, exponent = math.frexp(float(block.abs().max()))
        unit = exact_sums.WIDTH * (exponent // exact_sums.WIDTH - 1)
        for values in block.T.tolist():
            total = sum(round(math.ldexp(value, -unit)) for value in values)
            means.append(math.ldexp(float(total), unit) / len(terms))
    return torch.tensor(means, dtype=torch.float64).float()


def test_steps_have_the_means_of_rational_numbers(group, monkeypatch):
    """Ranks and parameters with and without sums, in memory of earlier steps, at any tops."""
    wrong = []
    for short_bytes, shift in itertools.product((0, 1 << 30), (0, 40)):
        monkeypatch.setattr(exact, "_SHORT_BYTES", short_bytes)
        state = ExactAverage([], lambda: True)
        for step in range(3):
            bucket = bucket_of(group, torch.float32, (4100, 3), lambda flat: None)
            bucket.buffer().mul_(2.0 ** (shift * (group.rank + step & 1)))
            named = list(zip(bucket.names(), bucket.gradients(), strict=True))
            named[0][1].mul_(2.0**-40)
            own = {name: [] for name in bucket.names()}
            # No rank has a sum at the first step, some have sums of one or two terms later.
            counts = [(rank + step) % 3 if step else 0 for rank in range(group.size)]
            for number in range(counts[group.rank]):
                for name, gradient in named:
                    term = gradient.reshape(-1).flip(0).mul_(1.0 + number)
                    # What is lost in a total with this one shows where that of rank 0 cancels it.
                    term[0] = 2.0**33 if group.rank == group.size - 1 else term[0]
                    if name != "p1" or step > 1:
                        state._add(name, term)
                        own[name].append(term)
                state._own_terms += 1
            for name, gradient in named:
                if group.rank == 0:
                    gradient[(0,) * gradient.dim()] = -(2.0**33) * counts[-1]
                own[name].append(gradient.reshape(-1).clone())
                own[name] += [torch.zeros_like(own[name][0])] * (1 + state._own_terms)
                del own[name][1 + state._own_terms :]
            exact_average_hook(state, bucket).wait()
            of_all = group.all_gather_object(own)
            for name, gradient in named:
                mean = rational_mean([term for of_rank in of_all for term in of_rank[name]])
                if not torch.equal(gradient.reshape(-1), mean):
                    wrong.append((short_bytes, shift, step, name))
    agree(group, not wrong, str(wrong))


def test_a_sum_on_any_rank_makes_all_send_sums(group):
    state = ExactAverage([], lambda: True)
    if group.rank == group.size - 1:
        state._sums["weight"] = ExactSum.of(torch.ones(2))
    state.begin(group)
    has_sum = state.are_terms
    state.sum_of(("weight",), (2,))
    state.begin(group)
    agree(group, not has_sum and state.are_terms and state.terms == group.size)


def test_constants_fit_each_other():
    assert exact_sums.MOST_TERMS == 1 << (53 - exact_sums.WIDTH)
    assert all(dtype.itemsize <= 4 for dtype in exact.DTYPES)
