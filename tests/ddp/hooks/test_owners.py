"""Gradients reduced to their owners, against plain DDP, whose averages all ranks hold."""

import contextlib
import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpidist.ddp import hooks, reducer
from mpidist.ddp.autograd_context import Reduction
from mpidist.ddp.hooks.default import allreduce_hook, bf16_compress_wrapper
from mpidist.ddp.hooks.owners import to_owners
from mpidist.ddp.hooks.powersgd import powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import DisagreementError
from tests.ddp.nets import Net, backward, data, loss_of
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]

SMALL = 0.0005  # MiB: several buckets


def bounds_of(module, size):
    """Return bounds: whole parameters, one in parts of which a rank owns two, one common."""
    trained = [p for p in module.parameters() if p.requires_grad]
    bounds = {p: ((number % size, 0, p.numel()),) for number, p in enumerate(trained)}
    cut, common = trained[2], trained[3]
    starts = [cut.numel() * part // (size + 1) for part in range(size + 2)]
    bounds[cut] = tuple((part % size, starts[part], starts[part + 1]) for part in range(size + 1))
    del bounds[common]
    return bounds


def flat(gradient):
    return gradient.detach().as_strided((gradient.numel(),), (1,), gradient.storage_offset())


def wrong(group, ddp, plain, bounds, is_same):
    """Return the names of the gradients that differ from this rank's share of plain DDP's."""
    named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
    for (name, p), q in zip(
        named, [q for q in plain.module.parameters() if q.requires_grad], strict=True
    ):
        expected = None if q.grad is None else q.grad.clone()
        if p in bounds:
            own = [(start, stop) for rank, start, stop in bounds[p] if rank == group.rank]
            if expected is not None and own:
                mask = torch.ones(p.numel(), dtype=torch.bool)
                for start, stop in own:
                    mask[start:stop] = False
                flat(expected)[mask] = 0
            elif not own:
                expected = None
        if (p.grad is None) != (expected is None):
            return f"{name}: {'no' if p.grad is None else 'a'} gradient"
        if p.grad is not None and not is_same(p.grad, expected):
            return f"{name}: off by {(p.grad - expected).abs().max():.1e}"
        if p.grad is not None and p.grad.stride() != p.stride():
            return f"{name}: strides {p.grad.stride()}"
    return ""


def close(one, other, tolerance=1e-5):
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def pair(
    group, options=None, hook=allreduce_hook, state=None, net=Net, around=lambda hook: hook, of=None
):
    """Return two modules of the same values, and the owners; the first reduces to them."""
    options = {"process_group": group, "bucket_cap_mb": SMALL, **(options or {})}
    one, plain = (
        DistributedDataParallel(net(), **options),
        DistributedDataParallel(net(), **options),
    )
    bounds = bounds_of(one.module, group.size)
    one.register_comm_hook(None if state is None else state(), around(to_owners(bounds, of)))
    plain.register_comm_hook(group if state is None else state(), hook)
    return one, plain, bounds


KINDS = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": False},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
]


@pytest.mark.parametrize("in_thread", [False, True])
def test_each_rank_gets_its_share(group, in_thread, monkeypatch):
    """Buckets of two dtypes, a module used twice, other strides, unused parameters.

    On one node the bits are the same.
    """
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    is_same = close if in_thread or torch.ones(1).is_cuda else torch.equal
    for options in KINDS:
        unused = bool({"find_unused_parameters", "static_graph"} & set(options))
        one, plain, bounds = pair(group, options, net=functools.partial(Net, with_unused=unused))
        for step in range(3):
            for ddp in (one, plain):
                ddp.zero_grad(set_to_none=step != 1)
                backward(ddp, group.rank, step)
            agree(
                group,
                not (text := wrong(group, one, plain, bounds, is_same)),
                f"{options}, step {step}: {text}",
            )
        if (
            unused
            and not options.get("skip_all_reduce_unused_params")
            and "static_graph" not in options
        ):
            for ddp in (one, plain):  # one rank, not always the owner
                ddp.zero_grad()
                x, target = data(group.rank, 9)
                loss_of(ddp(x, group.rank == 0), target).backward()
            agree(
                group,
                not (text := wrong(group, one, plain, bounds, is_same)),
                f"{options}, used by rank 0: {text}",
            )


@pytest.mark.parametrize("view", [True, False])
def test_gradients_of_several_passes_add_up(group, view):
    """A pass adds to averages held by one rank each, to gradients of this rank, or to none."""
    sequences = ["ss", "lss", "sls", "lzs", "szs", "slzs", "slns", "bs", "sbs"]
    for sequence in sequences:
        one, plain, bounds = pair(group, {"gradient_as_bucket_view": view})
        for step, what in enumerate(sequence):
            for ddp in (one, plain):
                if what in "zn":
                    ddp.zero_grad(set_to_none=what == "n")
                elif what == "b":  # without DDP
                    sum(
                        p.square().sum() for p in ddp.module.parameters() if p.requires_grad
                    ).backward()
                elif what == "l":
                    with ddp.no_sync():
                        backward(ddp, group.rank, step)
                else:
                    backward(ddp, group.rank, step)
        text = wrong(group, one, plain, bounds, close)
        agree(group, not text, f"{sequence}: {text}")


def test_a_rank_holds_its_share_and_the_buckets_being_reduced(group):
    """Bytes of gradients and buckets, each memory once, during the pass and at its end."""
    width, layers = 32, 12
    parts = [
        part
        for _ in range(layers)
        for part in (torch.nn.Linear(width, width, bias=False), torch.nn.Tanh())
    ]
    ddp = DistributedDataParallel(
        torch.nn.Sequential(*parts),
        process_group=group,
        bucket_cap_mb_list=[4 * width**2 / (1 << 20)],
    )
    weights = list(ddp.module.parameters())
    one_bytes = 4 * width**2

    def held():
        flats = {b.flat.data_ptr(): b.flat.nbytes for b in ddp.reducer.layout.buckets}
        own = {p.grad.data_ptr(): p.grad.nbytes for p in weights if p.grad is not None}
        kept = {t.data_ptr(): t.nbytes for t in ddp.reducer.layout.views.values()}
        return sum({**flats, **own, **kept}.values())

    most = 0

    def look(parameter):
        nonlocal most
        most = max(most, held())

    handles = [weight.register_post_accumulate_grad_hook(look) for weight in weights]
    ddp(torch.ones(2, width)).sum().backward()
    agree(group, most == held() == layers * one_bytes, f"plain DDP: {most}")
    bounds = {
        weight: ((number % group.size, 0, width**2),) for number, weight in enumerate(weights)
    }
    share = len(range(group.rank, layers, group.size)) * one_bytes
    for buffers in (1, 3):
        ddp.zero_grad()
        ddp.register_comm_hook(None, hooks.to_owners(bounds, buffers=buffers))
        for step in range(3):
            most = 0
            ddp.zero_grad()
            ddp(torch.ones(2, width)).sum().backward()
            agree(
                group,
                held() == buffers * one_bytes + share,
                f"{buffers} buffers: {held()} bytes, {share} its own",
            )
            # The buckets of the first pass are in another order.
            if step:
                limit = buffers * one_bytes + share + one_bytes
                agree(
                    group, most <= limit or weights[0].is_cuda, f"{buffers} buffers: {most} bytes"
                )
    for handle in handles:
        handle.remove()
    ddp.zero_grad()
    ddp.register_comm_hook(None, None)
    ddp(torch.ones(2, width)).sum().backward()
    agree(
        group,
        held() == layers * one_bytes and all(p.grad is not None for p in weights),
        "plain DDP again",
    )


def test_wrapped_hooks_give_each_rank_its_share(group):
    """Half precision around the hook, PowerSGD within, both; a hook that returns other memory."""
    powersgd = functools.partial(
        PowerSGDState, group, 2, start_powerSGD_iter=1, min_compression_rate=1
    )

    def doubled(state, bucket):
        future = allreduce_hook(group, bucket)
        return future.then(lambda done: done.value() * 2)

    ways = {
        "halves": (bf16_compress_wrapper(allreduce_hook), None, None, bf16_compress_wrapper, 2e-2),
        "PowerSGD": (powerSGD_hook, powersgd, powerSGD_hook, lambda hook: hook, 1e-5),
        "PowerSGD in halves": (
            bf16_compress_wrapper(powerSGD_hook),
            powersgd,
            powerSGD_hook,
            bf16_compress_wrapper,
            2e-2,
        ),
        "a user's": (doubled, None, doubled, lambda hook: hook, 1e-5),
    }
    for name, (hook, state, of, around, tolerance) in ways.items():
        one, plain, bounds = pair(group, None, hook, state, around=around, of=of)
        for step in range(3):
            for ddp in (one, plain):
                ddp.zero_grad()
                backward(ddp, group.rank, step)
            text = wrong(group, one, plain, bounds, functools.partial(close, tolerance=tolerance))
            agree(group, not text, f"{name}, step {step}: {text}")


def test_owners_get_their_share_of_uneven_inputs(group):
    """A rank without inputs gets its share of each pass, and its own gradients back at the end."""
    for view in (True, False):
        one, plain, bounds = pair(
            group, {"gradient_as_bucket_view": view, "find_unused_parameters": True}
        )
        seen = {one: [], plain: []}
        for ddp in (one, plain):
            uneven = ddp._uneven_inputs
            shadow = uneven.shadow

            def noting(iteration, ddp=ddp, shadow=shadow, seen=seen):
                shadow(iteration)
                seen[ddp].append(
                    [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
                )

            uneven.shadow = noting
            for epoch in range(2):
                with ddp.join():
                    for step in range(1 + group.rank):
                        ddp.zero_grad()
                        backward(ddp, group.rank, step + 10 * epoch)
                text = wrong(group, one, plain, bounds, close) if ddp is plain and epoch else ""
                agree(group, not text, text)
            del uneven.shadow
        is_right = True
        for shares, averages in zip(seen[one], seen[plain], strict=True):
            for p, share, average in zip(one.parameters(), shares, averages, strict=True):
                owners = bounds.get(p, ((group.rank, 0, p.numel()),)) if p.requires_grad else ()
                own = [
                    (start, stop)
                    for rank, start, stop in owners
                    if rank == group.rank and start < stop
                ]
                is_right = is_right and (share is None) == (not own)
                is_right = is_right and all(
                    close(flat(share)[a:b], flat(average)[a:b]) for a, b in own
                )
        agree(
            group,
            is_right and len(seen[one]) == 2 * (group.size - 1 - group.rank),
            f"while it shadows, views {view}",
        )
        for ddp in (one, plain):
            ddp.zero_grad(set_to_none=False)
            backward(ddp, group.rank, 3)
        agree(group, not (text := wrong(group, one, plain, bounds, close)), f"views {view}: {text}")


def test_sparse_gradients_are_averaged_on_all_ranks(group):
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = torch.nn.Embedding(9, 4, sparse=True)
            self.out = torch.nn.Linear(4, 3)

        def forward(self, words):
            return self.out(self.table(words))

    one, plain = (DistributedDataParallel(Words(), process_group=group) for _ in range(2))
    bounds = {p: ((group.size - 1, 0, p.numel()),) for p in one.module.parameters()}
    one.register_comm_hook(group, to_owners(bounds))
    for _ in range(2):
        for ddp in (one, plain):
            ddp.zero_grad()
            ddp(torch.tensor([group.rank, 5, 5])).square().sum().backward()
        agree(
            group,
            torch.equal(
                one.module.table.weight.grad.to_dense(), plain.module.table.weight.grad.to_dense()
            ),
        )
        is_owner = group.rank == group.size - 1
        agree(group, is_owner == (one.module.out.weight.grad is not None))
        agree(
            group, not is_owner or close(one.module.out.weight.grad, plain.module.out.weight.grad)
        )


@pytest.mark.parametrize("view", [True, False])
def test_captured_passes(group, monkeypatch, view):
    """Each rank's context gets the averages that the rank owns; ``.grad`` stays as it was."""
    one, plain, bounds = pair(group, {"gradient_as_bucket_view": view})
    joined = []

    def join(armed):
        joined.append(Reduction(armed))

    monkeypatch.setattr(reducer, "_on_armed", join)
    for step in range(3):
        found = []
        for ddp in (one, plain):
            x, target = data(group.rank, step)
            loss = loss_of(ddp(x), target)
            reduction = joined.pop()
            reduction.open()
            trained = [p for p in ddp.module.parameters() if p.requires_grad]
            torch.autograd.grad(loss, trained)
            brought = dict(reduction.finish())
            found.append([brought.get(p) for p in trained])
            if step == 0:
                agree(group, all(p.grad is None for p in trained))
        trained = [p for p in one.module.parameters() if p.requires_grad]
        for p, share, average in zip(trained, *found, strict=True):
            own = [
                (a, b)
                for rank, a, b in bounds.get(p, ((group.rank, 0, p.numel()),))
                if rank == group.rank and a < b
            ]
            right = (share is None) == (not own) and all(
                close(flat(share)[a:b], flat(average)[a:b]) for a, b in own
            )
            agree(group, right, f"step {step}, shape {tuple(p.shape)}")
        monkeypatch.setattr(reducer, "_on_armed", None)
        for ddp in (one, plain):
            with ddp.no_sync() if step else contextlib.nullcontext():
                backward(ddp, group.rank, step)
        monkeypatch.setattr(reducer, "_on_armed", join)
        agree(
            group,
            step or not (text := wrong(group, one, plain, bounds, close)),
            f"step {step}: {text}",
        )
    monkeypatch.setattr(reducer, "_on_armed", None)
    for ddp in (one, plain):
        backward(ddp, group.rank, 5)
    agree(group, not (text := wrong(group, one, plain, bounds, close)), text)


def test_the_hook_is_registered_and_removed(group):
    one, plain, bounds = pair(group)
    others = {
        p: tuple(((rank + 1) % group.size, a, b) for rank, a, b in owners)
        for p, owners in bounds.items()
    }
    for step, of in enumerate([bounds, None, others, {}, bounds, others]):
        one.zero_grad()
        plain.zero_grad()
        backward(one, group.rank, step)  # by the last hook
        one.zero_grad()
        one.register_comm_hook(None, None if of is None else to_owners(of))
        backward(one, group.rank, step)
        backward(plain, group.rank, step)
        agree(
            group, not (text := wrong(group, one, plain, of or {}, close)), f"change {step}: {text}"
        )
    # Averages that one rank holds are added to under the next owners.
    one.register_comm_hook(None, to_owners(bounds))
    backward(one, group.rank, 7)
    backward(plain, group.rank, 7)
    agree(group, not (text := wrong(group, one, plain, bounds, close)), text)


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("of", [None, allreduce_hook])
def test_torchs_ddp_gives_each_rank_its_share_and_zeros_elsewhere(group, of):
    """torch's DDP keeps its buckets; elements that a rank does not own become zeros."""
    one, plain = (
        TorchDDP(Net(), bucket_cap_mb=SMALL),
        DistributedDataParallel(Net(), process_group=group),
    )
    bounds = bounds_of(one.module, group.size)

    def torchs(state, bucket):
        work = torch.distributed.all_reduce(bucket.buffer().div_(group.size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    one.register_comm_hook(None, to_owners(bounds, None if of is None else torchs))
    for step in range(2):
        for ddp in (one, plain):
            ddp.zero_grad()
            backward(ddp, group.rank, step)
        for p, q in zip(one.module.parameters(), plain.module.parameters(), strict=True):
            if p.requires_grad:
                mask = torch.zeros(p.numel())
                for rank, start, stop in bounds.get(p, ((group.rank, 0, p.numel()),)):
                    mask[start:stop] = rank == group.rank
                agree(
                    group,
                    close(flat(p.grad), flat(q.grad) * mask),
                    f"step {step}, shape {tuple(p.shape)}",
                )
    if of is None:
        cut = next(p for p in bounds if p.numel() > 1)
        again = TorchDDP(Net())
        again.register_comm_hook(None, to_owners({cut: ((0, 0, 1),)}))
        raises_on_all(group, ValueError, lambda: backward(again, group.rank, 0), "cover 1 of")


def test_wrong_owners_are_refused_on_all_ranks(group):
    ddp = DistributedDataParallel(Net(), process_group=group)
    first, *_ = ddp.module.parameters()
    other, numel = Net().first.weight, first.numel()

    def registering(bounds, **options):
        return lambda: ddp.register_comm_hook(None, to_owners(bounds, **options))

    raises_on_all(group, ValueError, registering({first: ((0, 0, 1),)}), "cover 1 of")
    raises_on_all(
        group,
        ValueError,
        registering({first: ((group.size, 0, numel),)}),
        "as an owner; the group has ranks",
    )
    raises_on_all(
        group,
        ValueError,
        registering({other: ((0, 0, numel),)}),
        "whose gradients this module does not reduce",
    )
    raises_on_all(group, TypeError, registering({}, hook="a name"), "can be called")
    raises_on_all(group, ValueError, registering({}, buffers=0), "number of buffers")
    raises_on_all(group, TypeError, lambda: ddp.register_comm_hook(None, "a name"), "callable")
    if group.size > 1:
        raises_on_all(
            group,
            DisagreementError,
            registering({first: ((group.rank, 0, numel),)}),
            "owners of 'first.weight'",
        )
        raises_on_all(
            group,
            DisagreementError,
            registering({}, buffers=1 + group.rank),
            "number of buffers 1",
        )
        is_wrong = group.rank == 0
        error = ValueError if is_wrong else DisagreementError
        raises_on_all(
            group,
            error,
            registering({first: ((0, 0, numel - is_wrong),)}),
            "cover" if is_wrong else "was refused",
        )
        alone = group.split(group.rank)
        ddp.register_comm_hook(alone, to_owners({}))
        raises_on_all(group, ValueError, lambda: backward(ddp, group.rank, 0), "as its state")
        alone.close()
    first._in_backward_optimizers = [None]
    raises_on_all(group, ValueError, registering({}), "step in the backward pass")
    del first._in_backward_optimizers
    ddp.register_comm_hook(None, to_owners({}))
    backward(ddp, group.rank, 0)
    agree(
        group,
        ddp.module.first.weight.grad is not None,
        "a hook that was refused leaves the module as it was",
    )
