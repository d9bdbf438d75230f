"""Order of a group's collectives: mixed synchronous and asynchronous calls, and callbacks."""

import random
import statistics
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("default_group")]

_SIZES = [1, 7, 1000, 70_000]  # 70,000 doubles: past every eager limit and every single-call path


class Operation:
    """One random collective with its tensors and expected results, the same on all ranks."""

    def __init__(self, kind, numel, number, rank, size):
        self.kind, self.number = kind, number
        base = float(number % 100)
        self.given = torch.full((numel,), base + rank)
        self.wanted = [torch.full((numel,), base * size + size * (size - 1) / 2)]
        self.got = [self.given]
        root = number % size
        self.arguments = (self.given,)
        if kind == "broadcast":
            self.arguments = (self.given, root)
            self.wanted = [torch.full((numel,), base + root)]
        elif kind == "all_gather_into_tensor":
            self.got = [torch.zeros(numel * size)]
            self.wanted = [torch.cat([torch.full((numel,), base + peer) for peer in range(size)])]
            self.arguments = (*self.got, self.given)
        elif kind == "all_to_all_single":
            self.given = torch.cat(
                [torch.full((numel,), base + 10 * rank + to) for to in range(size)]
            )
            self.got = [torch.zeros(numel * size)]
            self.wanted = [
                torch.cat([torch.full((numel,), base + 10 * peer + rank) for peer in range(size)])
            ]
            self.arguments = (*self.got, self.given)
        elif kind == "reduce_scatter_tensor":
            self.got, self.arguments = [torch.zeros(numel)], ()
            self.arguments = (*self.got, self.given.repeat(size))
        elif kind == "reduce":
            self.arguments = (self.given, root)
            if rank != root:
                self.wanted = [self.given.clone()]
        elif kind == "barrier":
            self.got, self.wanted, self.arguments = [], [], ()

    def start(self, **options):
        return getattr(dist, self.kind)(*self.arguments, **options)

    def is_right(self):
        return all(map(torch.equal, self.got, self.wanted))


_KINDS = [
    "all_reduce",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
]


@pytest.mark.parametrize("seed", [1, 2])
def test_synchronous_calls_match_asynchronous_ones_of_other_ranks(world, seed):
    alike, own = random.Random(seed), random.Random(1000 * seed + world.rank)
    under_way, wrong = [], []

    def end(operation, work):
        if work is not None:
            work.wait()
        if not operation.is_right():
            wrong.append((operation.number, operation.kind))

    for number in range(500):
        operation = Operation(
            alike.choice(_KINDS), alike.choice(_SIZES), number, world.rank, world.size
        )
        if own.random() < 0.5:
            under_way.append((operation, operation.start(async_op=True)))
            while under_way and own.random() < 0.45:
                end(*under_way.pop(own.randrange(len(under_way))))
        else:
            operation.start()
            end(operation, None)
    for pair in under_way:
        end(*pair)
    agree(world, not wrong, f"wrong results: {wrong[:10]}")


def test_a_synchronous_call_waits_behind_the_queue(world):
    numbers = torch.ones(1000, dtype=torch.float64)
    for round_ in range(50):
        numbers.fill_(1)
        works = [dist.all_reduce(numbers, async_op=True) for _ in range(5)]
        if world.rank % 2:
            works.append(dist.all_reduce(numbers, async_op=True))
            works[-1].wait()
        else:
            dist.all_reduce(numbers)
        ended = all(work.is_completed() for work in works)
        agree(
            world, ended and numbers.eq(world.size**6).all().item(), f"round {round_}: {numbers[0]}"
        )


def test_a_callbacks_operation_runs_before_the_queued_ones(world):
    own = random.Random(world.rank)
    for round_ in range(100):
        first, second = torch.ones(100), torch.zeros(100)

        def chain(done, second=second):
            # Uses the result of the all-reduce that has just completed. On every rank, the queued
            # operations run after this one.
            second.copy_(done.value()[0])
            return dist.all_reduce(second, async_op=True).get_future().wait()[0] + 0

        future = dist.all_reduce(first, async_op=True).get_future().then(chain)
        if own.random() < 0.5:
            time.sleep(own.random() * 1e-3)
        others = [torch.full((50,), float(i)) for i in range(4)]
        works = [dist.all_reduce(other, async_op=True) for other in others]
        got = future.wait()
        for work in works:
            work.wait()
        ok = got.eq(world.size**2).all() and all(
            o.eq(i * world.size).all() for i, o in enumerate(others)
        )
        agree(world, bool(ok), f"round {round_}: {got[0]}, {[o[0].item() for o in others]}")


def test_a_callback_of_a_callback_and_a_synchronous_call_in_it(world):
    tensor = torch.ones(3)

    def again(done):
        dist.all_reduce(tensor)
        return dist.all_reduce(tensor, async_op=True).get_future()

    def last(done):
        done.value().wait()
        dist.all_reduce(tensor)

    future = dist.all_reduce(tensor, async_op=True).get_future().then(again).then(last)
    other = torch.ones(2)
    work = dist.all_reduce(other, async_op=True)
    future.wait()
    work.wait()
    agree(
        world,
        tensor.eq(world.size**4).all().item() and other.eq(world.size).all().item(),
        f"{tensor}, {other}",
    )


class Delayed(nn.Module):
    """Layers whose gradients become ready after random pauses that differ between ranks."""

    def __init__(self, seed, layers=6, width=20):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        own = random.Random(seed)
        for layer in self.layers:
            layer.register_full_backward_hook(
                lambda *_: time.sleep(own.random() * 1e-3 if own.random() < 0.3 else 0)
            )

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_callbacks_that_call_each_others_groups_end(world):
    one, other = world.clone("one"), world.clone("other")
    results, called, both = [torch.ones(8), torch.ones(8)], [], threading.Barrier(2)

    def calling(group, result):
        def callback(future):
            both.wait(60)
            group.all_reduce(result)

        return callback

    # No operation ends before its callback is added.
    with one._progress.lock, other._progress.lock:
        for group, peer, result in zip((one, other), (other, one), results, strict=True):
            work = group.all_reduce(torch.ones(4), async_op=True)
            called.append(work.get_future().then(calling(peer, result)))
    for future in called:
        future.wait(60)
    agree(world, all(result.eq(world.size).all() for result in results), f"{results}")
    one.close()
    other.close()


def fingerprint(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()


@pytest.mark.slow
def test_powersgd_of_many_buckets_with_ranks_out_of_step(world):
    torch.manual_seed(0)
    # About one layer per bucket: each bucket starts its second all-reduce from a callback, while
    # other buckets are in flight.
    model = DistributedDataParallel(Delayed(world.rank), bucket_cap_mb=2e-3)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    update = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(world.rank)
    before = fingerprint(model)
    for _ in range(120):
        x = torch.randn(4, 20, generator=data)
        update.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        update.step()
    prints = world.all_gather_object(fingerprint(model))
    agree(
        world,
        len(set(prints)) == 1 and prints[0] != before,
        "weights differ between ranks, or did not move",
    )
    agree(world, len(state.error_dict) > 2, f"only {len(state.error_dict)} buckets were compressed")


def test_join_with_ranks_out_of_step(world):
    torch.manual_seed(0)
    model = DistributedDataParallel(Delayed(world.rank), bucket_cap_mb=2e-3)
    update = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        with Join([model], divide_by_initial_world_size=False):
            for _ in range(5 + 7 * ((world.rank + 1) % world.size)):
                x = torch.randn(4, 20, generator=data)
                update.zero_grad()
                (model(x) - x.roll(1, 1)).square().mean().backward()
                update.step()
        numbers = torch.ones(3)
        dist.all_reduce(numbers)
        agree(world, numbers.eq(world.size).all().item(), f"after Join: {numbers}")
    prints = world.all_gather_object(fingerprint(model))
    agree(world, len(set(prints)) == 1, "weights differ between ranks")


def timed_calls(group, size, count=300):
    """Return the median duration of an all-reduce in seconds, and whether all were right."""
    durations, right = [], True
    for number in range(count):
        tensor = torch.full((16,), float(number))
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        durations.append(time.perf_counter() - start)
        right = right and tensor.eq(number * size).all().item()
    return statistics.median(durations), right


def in_two_threads(world, groups):
    """Issue all-reduces from two threads, each on its own group; return both ``timed_calls``."""
    results = [None, None]

    def use(place):
        results[place] = timed_calls(groups[place], world.size)

    threads = [threading.Thread(target=use, args=(place,)) for place in (0, 1)]
    world.barrier()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def two_groups():
    groups = [dist.new_group(), dist.new_group()]
    yield groups
    for group in groups:
        dist.destroy_process_group(group)


def test_two_groups_in_two_threads(world, two_groups):
    agree(world, all(right for _, right in in_two_threads(world, two_groups)), "wrong results")


@pytest.mark.timing
def test_two_threads_do_not_keep_each_other_from_running(world, two_groups):
    """Two threads are not slower than one by an order of magnitude: the best of three tries."""
    tries = []
    for _ in range(3):
        world.barrier()
        alone, _ = timed_calls(two_groups[0], world.size)
        slowest = max(median for median, _ in in_two_threads(world, two_groups))
        tries.append(max(world.all_gather_object(slowest / alone)))
    agree(world, min(tries) < 10, f"times as long as alone: {tries}")


def test_two_groups_in_two_threads_asynchronously(world):
    groups = [dist.new_group(), dist.new_group()]
    wrong = []

    def use(place):
        own = random.Random(10 * place + world.rank)
        for number in range(200):
            tensor = torch.full((1000,), float(number))
            if own.random() < 0.5:
                dist.all_reduce(tensor, group=groups[place], async_op=True).wait()
            else:
                dist.all_reduce(tensor, group=groups[place])
            if not tensor.eq(number * world.size).all():
                wrong.append((place, number))

    threads = [threading.Thread(target=use, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    agree(world, not wrong, f"{wrong[:5]}")
