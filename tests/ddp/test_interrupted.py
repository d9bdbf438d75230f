"""Passes that an exception has ended: the next one's gradients are those of it alone."""

import copy
import threading
import time

import pytest
import torch

from mpidist.ddp import (
    DiLoCo,
    PowerSGDState,
    allreduce_hook,
    bf16_compress_hook,
    powerSGD_hook,
    to_owners,
)
from mpidist.ddp.hooks.default import bf16_compress_wrapper
from mpidist.ddp.hooks.stages import in_order
from mpidist.ddp.module import DistributedDataParallel
from mpidist.future import completed
from mpidist.zero.optimizer import OSS
from tests.tools.simulated_nodes import groups
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)

SIZE = 64
EACH_ITS_BUCKET = [1e-5]


class GaveUp(Exception):
    """Raised within a backward pass."""


class GivesUp(torch.autograd.Function):
    """Identity whose backward raises while ``is_on``."""

    is_on = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if GivesUp.is_on:
            raise GaveUp
        return gradient


class Layers(torch.nn.Module):
    """Two layers, of which the backward pass reaches the last one first."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(SIZE, SIZE, bias=False)
        self.last = torch.nn.Linear(SIZE, SIZE, bias=False)
        torch.nn.init.eye_(self.first.weight)
        torch.nn.init.eye_(self.last.weight)

    def forward(self, x):
        return self.last(GivesUp.apply(self.first(x)))

    def pass_of(self, value, called=None):
        """Run a pass whose gradients are ``value``; return the values found."""
        self.zero_grad()
        (called or self)(torch.full((1, SIZE), value)).sum().backward()
        return self.values()

    def values(self):
        found = [p.grad for p in self.parameters() if p.grad is not None]
        return {float(edge) for grad in found for edge in (grad.min(), grad.max()) if edge}


@pytest.fixture
def between_nodes(world, monkeypatch):
    """A group whose ranks are each on a node of its own: its thread reduces buckets."""
    with groups(world, monkeypatch) as make:
        yield make("alone")


@pytest.fixture
def gives_up():
    """Return a function that runs a pass which an exception ends behind its first bucket."""

    def run(net, called):
        GivesUp.is_on = True
        try:
            with pytest.raises(GaveUp):
                net.pass_of(1000.0, called)
        finally:
            GivesUp.is_on = False

    return run


def wrapped(net, group, kind):
    """Return the module with a way to average of a kind, and what must live as long."""
    options = {"gradient_as_bucket_view": kind != "copies", "exact_average": kind == "exact"}
    ddp = DistributedDataParallel(
        net, process_group=group, bucket_cap_mb_list=EACH_ITS_BUCKET, **options
    )
    optimizer = None
    if kind == "bf16":
        ddp.register_comm_hook(group, bf16_compress_hook)
    if kind == "owners":
        optimizer = OSS(net.parameters(), torch.optim.SGD, group, lr=0.1)
        ddp.register_comm_hook(None, to_owners(optimizer.bounds()))
    return ddp, optimizer


@pytest.mark.filterwarnings("ignore:a backward pass of a DistributedDataParallel with exact")
@pytest.mark.parametrize("kind", ["views", "copies", "bf16", "owners", "exact"])
def test_the_next_pass_fills_no_bucket_that_is_still_averaged(between_nodes, gives_up, kind):
    group, net = between_nodes, Layers()
    ddp, _optimizer = wrapped(net, group, kind)
    net.pass_of(1.0, ddp)
    for slow in (0, group.size - 1):
        for _ in range(5):
            if group.rank == slow:
                time.sleep(0.01)
            gives_up(net, ddp)
            found = net.pass_of(1.0 + group.rank, ddp)
            agree(group, found <= {(group.size + 1) / 2}, f"{kind}: {found}")


@pytest.mark.parametrize("marks", [True, False])
def test_a_hook_that_raises_leaves_no_average_to_the_next_pass(between_nodes, marks):
    group, net, is_on = between_nodes, Layers(), False
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb_list=EACH_ITS_BUCKET)

    def hook(state, bucket):
        if is_on and bucket.index() == 1:
            raise GaveUp
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(group, in_order(hook) if marks else hook)
    net.pass_of(1.0, ddp)
    for _ in range(5):
        is_on = True
        with pytest.raises(GaveUp):
            net.pass_of(1000.0, ddp)
        is_on = False
        found = net.pass_of(1.0 + group.rank, ddp)
        agree(group, found == {(group.size + 1) / 2}, str(found))


def test_powersgd_keeps_no_error_of_gradients_that_were_given_up(group, gives_up):
    net = Layers()
    state = PowerSGDState(group, start_powerSGD_iter=0)
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb_list=EACH_ITS_BUCKET)
    ddp.register_comm_hook(state, powerSGD_hook)

    def noise(scale):
        torch.manual_seed(group.rank)
        net.zero_grad()
        (ddp(torch.randn(8, SIZE)) * scale).square().mean().backward()
        return max(float(error.norm()) for error in state.error_dict.values())

    before = noise(1.0)
    GivesUp.is_on = True
    try:
        with pytest.raises(GaveUp):
            noise(1e3)
    finally:
        GivesUp.is_on = False
    after = noise(1.0)
    agree(group, after < 3 * before, f"{before} before, {after} behind it")


def test_the_bare_module_is_not_averaged_behind_a_pass_that_was_given_up(group, gives_up):
    net = Layers()
    ddp, _ = wrapped(net, group, "views")
    net.pass_of(1.0, ddp)
    gives_up(net, ddp)
    found = net.pass_of(1.0 + group.rank)
    agree(group, found == {1.0 + group.rank}, str(found))


def test_buckets_keep_their_order_where_autograd_has_several_threads(group):
    """As for a module on two devices."""
    net, order = Layers(), []
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb_list=EACH_ITS_BUCKET)
    net.pass_of(1.0, ddp)
    is_in_hook, other_is_ready = threading.Event(), threading.Event()

    @in_order
    def hook(state, bucket):
        if bucket.index() == 0:
            is_in_hook.set()
            other_is_ready.wait(0.2)
        order.append(bucket.index())
        return completed(bucket.buffer())

    ddp.register_comm_hook(None, hook)
    reducer = ddp.reducer
    reducer.captures = True  # no engine runs: its callback is not queued
    reducer.arm([])
    reducer._begin()

    def ready(index):
        if index == 1:
            is_in_hook.wait()
        for place in reducer.layout.plan[index]:
            reducer.parameters[place].grad = torch.ones(SIZE, SIZE)
            reducer.mark_ready(place, reducer.parameters[place])
        if index == 1:
            other_is_ready.set()

    threads = [threading.Thread(target=ready, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reducer.finish_captured()
    reducer.end_captured()
    agree(group, order == [0, 1], str(order))


def test_one_compressing_wrapper_serves_several_modules(between_nodes):
    group = between_nodes

    def gradients(make):
        torch.manual_seed(0)
        nets = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
        ddps = [DistributedDataParallel(net, process_group=group) for net in nets]
        for ddp in ddps:
            ddp.register_comm_hook(group, make())
        x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(group.rank))
        group.barrier()
        if group.rank == 0:
            time.sleep(0.05)  # so that both buckets of the others are on their way
        (ddps[0](x).square().mean() + 100 * ddps[1](x).square().mean()).backward()
        return [net.weight.grad.clone() for net in nets]

    own = gradients(lambda: bf16_compress_wrapper(allreduce_hook))
    shared = bf16_compress_wrapper(allreduce_hook)
    found = list(map(torch.equal, own, gradients(lambda: shared)))
    agree(group, all(found), str(found))


def test_a_loaded_state_of_diloco_is_not_overwritten_by_an_average_in_flight(between_nodes):
    group = between_nodes

    def run(rolls_back):
        torch.manual_seed(0)
        net = torch.nn.Linear(SIZE, SIZE)
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        diloco = DiLoCo(net, inner, every=4, overlap=2, process_group=group)

        def step(size):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, size)
            inner.step()

        for _ in range(4):
            step(0.001 * (1 + group.rank))
        saved = copy.deepcopy(diloco.state_dict())
        if rolls_back:
            for _ in range(3):
                step(0.001)
            group.barrier()
            if group.rank == group.size - 1:
                time.sleep(0.1)
            step(1.0)  # another average begins
            diloco.load_state_dict(saved)
        for _ in range(2):
            step(0.0)
        return net.weight.detach().double().mean().item()

    plain, rolled_back = run(False), run(True)
    agree(group, plain == rolled_back, f"{plain} without, {rolled_back} with a rollback")
