"""Outer steps: as one process that plays all ranks computes them in plain torch."""

import copy
import importlib
import importlib.util
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mpidist import ddp as mddp
from mpidist.checkpoint import commit, load, save
from mpidist.ddp import AdaptiveState, DiLoCo, DistributedDataParallel, PowerSGDState
from mpidist.errors import DisagreementError, MpidistError
from tests.tools.support import agree, raises_on_all

LR = 0.05


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 8), torch.nn.Linear(8, 3)
    )


def inner_of(model):
    return torch.optim.AdamW(model.parameters(), lr=LR)


def outer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def step(model, optimizer, rank, number):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))
    optimizer.zero_grad()
    (model(x) - x[:, :3].sin()).square().mean().backward()
    optimizer.step()


def same(one, other, tolerance=0.0):
    return all(
        torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def twin(ranks, steps, every, runs, overlap=0, alpha=0.0):
    """Return the models of all ranks, whose pseudo-gradients torch averages in this process."""
    models = [net() for _ in range(ranks)]
    inners = [inner_of(model) for model in models]
    whole = net()
    outer = outer_of(whole)
    ends = [(f + 1) * every // len(runs) for f in range(len(runs))]
    waiting = []
    for number in range(1, steps + 1):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            step(model, inner, rank, number)
        for f, run in enumerate(runs):
            if (number - ends[f]) % every == 0 and number >= ends[f]:
                means = {
                    place: torch.stack(
                        [
                            list(whole.parameters())[place].detach()
                            - list(model.parameters())[place].detach()
                            for model in models
                        ]
                    ).mean(0)
                    for place in run
                }
                waiting.append((number + overlap, means))
        for due, means in list(waiting):
            if due == number:
                waiting.remove((due, means))
                outer.zero_grad()
                for place, mean in means.items():
                    list(whole.parameters())[place].grad = mean
                outer.step()
                with torch.no_grad():
                    for model in models:
                        for place in means:
                            own = list(model.parameters())[place]
                            own.copy_(alpha * own + (1 - alpha) * list(whole.parameters())[place])
    return models


def trained(group, steps, model=None, first=1, **options):
    model = net(group.rank) if model is None else model
    inner = inner_of(model)
    diloco = DiLoCo(model, inner, outer_of(model), process_group=group, **options)
    for number in range(first, first + steps):
        step(model, inner, group.rank, number)
    return model, diloco


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "runs", "alpha"),
    [
        ({"every": 4}, [range(6)], 0),
        ({"every": 4, "fragments": 2}, [[0, 1], [2, 3, 4, 5]], 0),
        ({"every": 4, "overlap": 3, "fragments": 2}, [[0, 1], [2, 3, 4, 5]], 0.5),
        ({"every": 3, "overlap": 1, "alpha": 0.25}, [range(6)], 0.25),
    ],
)
def test_all_ranks_do_what_one_process_computes(group, options, runs, alpha):
    model, diloco = trained(group, 11, **options)
    assert [len(one.names) for one in diloco.fragments] == [len(run) for run in runs]
    expected = twin(group.size, 11, options["every"], runs, options.get("overlap", 0), alpha)
    agree(group, same(model, expected[group.rank], 2e-5), str(options))


@pytest.mark.mpi
def test_each_step_with_a_plain_outer_step_is_the_average_of_the_parameters(group):
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = DiLoCo(
        model, inner, torch.optim.SGD(model.parameters(), lr=1.0), every=1, process_group=group
    )
    plain = net()
    wrapped = DistributedDataParallel(plain, process_group=group)
    of_plain = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for number in range(3):
        step(model, inner, group.rank, number)
        step(wrapped, of_plain, group.rank, number)
    agree(group, same(model, plain, 1e-6) and diloco.steps == 3)


@pytest.fixture
def replica(world, monkeypatch):
    """This rank as a replica of torchft."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    module = importlib.import_module("training.torchft_replica")
    made = module.TorchftReplica(MPI.COMM_WORLD)
    yield made
    made.close()


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="pip install torchft-nightly"
)
@pytest.mark.parametrize(("parts", "overlap"), [(1, 0), (2, 0), (2, 1)])
def test_torchft_makes_the_same_parameters(group, replica, parts, overlap):
    """Its average begins so many steps earlier as ours is merged later."""
    every, steps = 4, 16
    model = net()
    fragments = [model[:2], model[2:]] if parts == 2 else [model]
    inner = inner_of(model)
    # One outer optimizer would step the other fragments by the gradients of the inner steps.
    theirs = replica.diloco(
        fragments,
        inner,
        [outer_of(one) for one in fragments],
        every,
        fragment_sync_delay=overlap,
        fragment_update_alpha=0.5 if overlap else 0.0,
    )
    for number in range(1, steps + 1):
        step(model, inner, group.rank, number)
    ours = net()
    diloco = DiLoCo(
        ours,
        inner_of(ours),
        outer_of(ours),
        every=every,
        fragments=[ours[:2], ours[2:]] if parts == 2 else 1,
        overlap=overlap,
        process_group=group,
    )
    # Theirs begins fragment f behind step (f + 1) · H / F less the delay.
    diloco.steps = overlap
    for number in range(1, steps + 1):
        step(ours, diloco.inner, group.rank, number)
    farthest = max(
        float((a - b).detach().abs().max())
        for a, b in zip(ours.parameters(), model.parameters(), strict=True)
    )
    theirs.__exit__(None, None, None)
    agree(group, farthest < 1e-5, f"{farthest}")


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["bf16", "fp16 of int8", "powersgd", "own"])
def test_hooks_average_pseudo_gradients(group, name):
    state = None

    def own(state, bucket):
        return mddp.allreduce_hook(state, bucket).then(lambda future: future.value().clone())

    hook = {
        "bf16": mddp.bf16_compress_hook,
        "fp16 of int8": mddp.fp16_compress_wrapper(mddp.quantization_perchannel_hook),
        "powersgd": mddp.powerSGD_hook,
        "own": own,
    }[name]
    if name == "powersgd":
        state = PowerSGDState(group, 2, start_powerSGD_iter=1, min_compression_rate=1)
    model, diloco = trained(group, 12, every=4, fragments=3, hook=hook, state=state)
    tolerance = 0.5 if name == "powersgd" else 0.05
    diloco.sync()
    values = [one.detach().clone() for one in model.parameters()]
    for one in values:
        group.broadcast(one, 0)
    is_equal = all(map(torch.equal, values, model.parameters()))
    if state is not None:
        # The rounds; sync averages the two fragments that inner steps have moved since.
        assert state.iter == 3 and set(state.error_dict) <= dict(model.named_parameters()).keys()
    agree(group, is_equal and same(model, trained_and_synced(group), tolerance), name)


@pytest.mark.mpi
@pytest.mark.parametrize("fragments", [1, 2])
def test_sync_averages_what_inner_steps_have_moved(group, fragments):
    """Momentum alone moves nothing: neither behind an average nor at a second sync."""
    model, diloco = trained(group, 8, every=4, fragments=fragments)
    last = diloco.fragments[-1]
    held = [one.clone() for one in last.global_parameters]
    diloco.sync()
    assert all(map(torch.equal, held, last.global_parameters))
    values = [one.detach().clone() for one in model.parameters()]
    diloco.sync()
    agree(group, all(map(torch.equal, values, model.parameters())))
    # One rank has moved: all average.
    if group.rank == 0:
        step(model, diloco.inner, 0, 9)
    diloco.sync()
    moved = [not torch.equal(*pair) for pair in zip(values, model.parameters(), strict=True)]
    sums = group.all_gather_object(sums_of(*model.parameters()))
    agree(group, any(moved) and len({str(one) for one in sums}) == 1)


def trained_and_synced(group):
    model, diloco = trained(group, 12, every=4, fragments=3)
    diloco.sync()
    return model


@pytest.mark.mpi
def test_ranks_of_other_numbers_of_steps_meet_in_sync(group):
    """A rank that has ended takes part with what it has reached; then all hold the same."""
    steps = 4 + 3 * (group.size - 1 - group.rank)
    model, diloco = trained(group, steps, every=2, fragments=2, overlap=1)
    diloco.sync()
    digests = group.all_gather_object((diloco.steps, sums_of(*model.parameters())))
    agree(group, len({str(one) for one in digests}) == 1 and diloco.steps == 1 + 3 * group.size)
    step(model, diloco.inner, group.rank, 0)
    diloco.remove()
    step(model, diloco.inner, group.rank, 0)
    agree(group, diloco.steps == 2 + 3 * group.size)


@pytest.mark.mpi
def test_buffers_integers_frozen_and_sparse_parameters(group):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(5, 4, sparse=True)
            self.norm = torch.nn.BatchNorm1d(4)
            self.wide = torch.nn.Linear(4, 2).double()
            self.codes = torch.nn.Parameter(torch.arange(3), requires_grad=False)

        def forward(self, words):
            return self.wide(self.norm(self.words(words)).double())

    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = DiLoCo(model, inner, outer, every=2, process_group=group)
    own = []
    for number in range(2):
        model.codes.fill_(group.rank)
        inner.zero_grad()
        model(torch.arange(5).roll(group.rank + number)).square().mean().backward()
        own.append(model.norm.running_mean.clone())
        inner.step()
    mean = own[-1].clone()
    group.all_reduce(mean, "avg")
    fine = torch.allclose(model.norm.running_mean, mean) and model.codes.eq(group.rank).all()
    values = group.all_gather_object(sums_of(*inner_values(diloco)))
    agree(group, bool(fine) and len({str(each) for each in values}) == 1)


def sums_of(*tensors):
    return [one.detach().double().sum().item() for one in tensors]


def inner_values(diloco):
    return [own for fragment in diloco.fragments for own in fragment.parameters]


@pytest.mark.mpi
def test_a_pseudo_gradient_that_is_not_finite_is_an_error_on_all_ranks(group):
    model, diloco = trained(group, 3, every=2)
    held = [one.clone() for one in diloco.fragments[0].global_parameters]
    if group.rank == group.size - 1:
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
    text = raises_on_all(
        group, MpidistError, lambda: step(model, diloco.inner, group.rank, 9), "not finite"
    )
    assert f"the parameters of rank {group.size - 1} are not" in text
    named = dict(model.named_parameters())
    values = diloco.global_state(model.state_dict(), named)
    agree(group, all(map(torch.equal, held, [values[name] for name in named])))


@pytest.mark.mpi
def test_a_nan_of_one_ranks_buffer_stays_there(group):
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3))
    inner = inner_of(model)
    DiLoCo(model, inner, every=1, process_group=group)
    is_last = group.rank == group.size - 1
    if is_last:
        model[1].running_mean[0] = float("nan")
    step(model, inner, group.rank, 1)
    found = model[1].running_mean.isfinite().tolist()
    agree(group, found == [not is_last, True, True])


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [0, 1])
def test_buffers_that_change(group, overlap):
    """Alike on all ranks they are averaged; a rank that differs is an error on all."""

    def wide(model, size):
        model.cache = torch.full((size,), float(group.rank))

    model = net()
    model.register_buffer("cache", torch.zeros(1))
    inner = inner_of(model)
    diloco = DiLoCo(model, inner, every=2, overlap=overlap, process_group=group)
    # Registered on one rank alone: its own.
    if group.rank == 0:
        model.register_buffer("late", torch.ones(3))
    wide(model, 2)
    for _ in range(2 + overlap):
        inner.step()
    mean = (group.size - 1) / 2
    agree(group, model.cache.eq(mean).all() and (group.rank > 0 or model.late.eq(1).all()))
    last = group.size - 1
    if last:
        wide(model, 3 if group.rank == last else 2)

        def go():
            inner.step()
            inner.step()

        raises_on_all(group, MpidistError, go, f"the buffers cache of rank {last} are of other")
        wide(model, 2)
        diloco.sync()
        agree(group, model.cache.eq(mean).all())


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [0, 1])
def test_parameters_that_change_on_one_rank_are_an_error_on_all(group, overlap):
    """They are not averaged, and the other ranks do not wait for them."""
    last = group.size - 1
    for change, text in (
        (lambda model: model[0].requires_grad_(True), "requires a gradient"),
        (lambda model: model[2].double(), "another dtype"),
    ):
        model = net()
        model[0].requires_grad_(False)
        inner = inner_of(model)
        diloco = DiLoCo(model, inner, every=2, overlap=overlap, process_group=group)
        if group.rank == last:
            change(model)

        def go(diloco=diloco, inner=inner):
            for _ in range(2 + overlap):
                inner.step()
            diloco.sync()

        expected = text if group.rank == last else f"of rank {last} are no longer those"
        caught = None
        try:
            go()
        except MpidistError as error:
            caught = str(error)
        agree(group, caught is not None and expected in caught, f"{caught}")


@pytest.mark.mpi
def test_a_hook_that_raises_leaves_no_average_to_merge(group):
    calls = []

    def once(state, bucket):
        calls.append(bucket)
        if len(calls) == 1:
            raise RuntimeError("of the hook")
        return mddp.allreduce_hook(state, bucket)

    model, diloco = trained(group, 1, every=2, overlap=1, hook=once)
    raises_on_all(
        group, RuntimeError, lambda: step(model, diloco.inner, group.rank, 2), "of the hook"
    )
    held = [one.clone() for one in diloco.fragments[0].global_parameters]
    step(model, diloco.inner, group.rank, 3)
    agree(group, all(map(torch.equal, held, diloco.fragments[0].global_parameters)))
    diloco.sync()
    sums = group.all_gather_object(sums_of(*model.parameters()))
    agree(group, len({str(one) for one in sums}) == 1)


@pytest.mark.mpi
def test_half_precision_and_more_steps_than_are_taken(group):
    for dtype in (torch.float16, torch.bfloat16):
        model = net().to(dtype)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, inner, every=1000, process_group=group)
        for _ in range(3):
            for own in model.parameters():
                own.grad = torch.full_like(own, group.rank + 1.0)
            inner.step()
        mean = (group.size + 1) / 2
        expected = net()
        with torch.no_grad():
            for own in expected.parameters():
                # Nesterov's first step.
                own.sub_(0.7 * 1.9 * 0.3 * mean)
        diloco.sync()
        diloco.remove()
        diloco.remove()
        agree(group, same(model.float(), expected, 0.03) and diloco.steps == 3, str(dtype))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {"every": lambda rank: 2 + rank},
        {"every": lambda rank: 2, "overlap": lambda rank: rank % 2},
        {"every": lambda rank: 2, "alpha": lambda rank: rank % 2},
        {"every": lambda rank: 2, "fragments": lambda rank: 1 + rank % 2},
        {
            "every": lambda rank: 2,
            "hook": lambda rank: [mddp.noop_hook, mddp.allreduce_hook][rank % 2],
        },
    ],
)
def test_settings_that_differ_are_refused_on_all_ranks(group, options):
    model = net()
    own = {name: of(group.rank) for name, of in options.items()}
    inner, outer = inner_of(model), outer_of(model)

    def construct():
        DiLoCo(model, inner, outer, process_group=group, **own)

    raises_on_all(group, DisagreementError, construct, "ranks differ")
    held = outer.param_groups[0]["params"]
    agree(group, all(a is b for a, b in zip(held, model.parameters(), strict=True)))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 2, "alpha": 2}, ValueError, "alpha must be at most 1"),
        ({"every": 8, "fragments": 7}, ValueError, "number of parameters"),
        ({"every": 2, "hook": 3}, TypeError, "callable"),
        ({"every": 2, "fragments": [1]}, TypeError, "fragments must be modules; got int"),
        ({"every": 2, "outer": 3}, TypeError, "outer must be a torch.optim.Optimizer"),
        ({"every": 2, "outer": "other"}, ValueError, "outer must hold"),
        ({"every": 2, "inner": "other"}, ValueError, "inner steps none"),
        ({"every": 2, "fragments": "some"}, ValueError, "exactly one"),
        ({"every": 2, "outer": "inner"}, ValueError, "another optimizer than inner"),
        ({"every": 2, "outer": "Adagrad"}, ValueError, "no state before its first step"),
        ({"every": 2, "hook": default_hooks.allreduce_hook}, TypeError, "is torch's"),
        ({"every": 2, "module": "sparse"}, ValueError, "'wide' is sparse"),
        ({"every": 2, "module": "frozen"}, ValueError, "found 0 on"),
        ({"every": 2, "module": [1]}, TypeError, "module must be a torch.nn.Module"),
    ],
)
def test_wrong_arguments_are_refused_on_all_ranks(group, options, error, text):
    model, other = net(), net()
    given = {"inner": inner_of(model), "outer": None, "module": model, **options}
    for name in ("inner", "outer"):
        if given[name] == "other":
            given[name] = inner_of(other)
    if given["outer"] == "Adagrad":  # makes its state when it is made
        given["outer"] = torch.optim.Adagrad(model.parameters())
    if given["outer"] == "inner":
        given["outer"] = given["inner"]
    if given["module"] == "sparse":
        model.register_buffer("wide", torch.eye(2).to_sparse())
        given["module"] = model
    if given["module"] == "frozen":
        given["module"] = model.requires_grad_(False)
    if given.get("fragments") == "some":
        given["fragments"] = [model[0], model[2]]
    module, inner, outer = (given.pop(name) for name in ("module", "inner", "outer"))
    raises_on_all(
        group, error, lambda: DiLoCo(module, inner, outer, process_group=group, **given), text
    )


@pytest.mark.mpi(min_size=2)
def test_a_state_of_other_ranks_is_refused(group):
    alone = group.split(group.rank)
    model = net()
    inner = inner_of(model)
    for state, hook in (
        (alone, mddp.allreduce_hook),
        (PowerSGDState(alone), mddp.powerSGD_hook),
    ):
        construct = partial(
            DiLoCo, model, inner, every=2, process_group=group, hook=hook, state=state
        )
        raises_on_all(group, ValueError, construct, "give both the same group")
    alone.close()


@pytest.mark.mpi
def test_errors_of_powersgd_beside_a_mixture_are_warned_of(group, monkeypatch):
    def construct(state, hook=mddp.powerSGD_hook, **given):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(group, 0, every=4, hook=hook, state=state, **given)
        return ["use_error_feedback" in str(one.message) for one in caught]

    plain = PowerSGDState(group, use_error_feedback=False)
    agree(group, construct(PowerSGDState(group), overlap=2) == [True], "with an overlap")
    agree(group, construct(PowerSGDState(group), alpha=0.25) == [True], "with alpha")
    agree(group, construct(PowerSGDState(group)) == [], "without a mixture")
    agree(group, construct(plain, overlap=2) == [], "without errors")
    monkeypatch.setattr(type(group), "is_single_node", False)
    for candidates in (("none", "powersgd-1"), ("none", "bf16")):
        state = AdaptiveState(group, candidates)
        expected = [True] if state.decides and len(candidates[1]) > 4 else []
        found = construct(state, mddp.adaptive_hook, overlap=2)
        agree(group, found == expected, str(candidates))


@pytest.mark.mpi
def test_two_of_the_same_parameters_are_refused(group):
    model, diloco = trained(group, 0, every=2)

    def again():
        return DiLoCo(model, diloco.inner, every=2, process_group=group)

    raises_on_all(group, ValueError, again, "remove() it first")
    diloco.remove()
    other = again()
    step(model, diloco.inner, group.rank, 1)
    agree(group, (diloco.steps, other.steps) == (0, 1))


@pytest.mark.mpi
def test_parts_of_parameters_are_refused(group, default_group):
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size,)))
    inner = inner_of(model)
    raises_on_all(
        group, ValueError, lambda: DiLoCo(model, inner, every=2, process_group=group), "DTensor"
    )


@pytest.mark.mpi(min_size=2)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(group):
    model = net()
    inner, every = inner_of(model), int(group.rank != 1)
    error = DisagreementError if every else ValueError
    caught = None
    try:
        DiLoCo(model, inner, every=every, process_group=group)
    except Exception as raised:
        caught = raised
    agree(group, isinstance(caught, error) and "every must be at least 1" in str(caught))


@pytest.fixture
def folder(group, tmp_path_factory):
    return group.broadcast_object(str(tmp_path_factory.mktemp("run")) if group.rank == 0 else None)


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["save", "commit"])
def test_a_run_goes_on_with_the_same_bits_from_the_middle_of_an_average(group, folder, how):
    """Each rank's own parameters, optimizer, errors and the average on its way."""

    def make():
        state = PowerSGDState(group, 1, start_powerSGD_iter=1, min_compression_rate=1)
        return {
            "every": 4,
            "overlap": 2,
            "fragments": 2,
            "hook": mddp.powerSGD_hook,
            "state": state,
        }

    model, _ = trained(group, 15, **make())
    first, diloco = trained(group, 9, **make())
    (save if how == "save" else commit)(folder, 9, model=first, hook_state=diloco, group=group)
    second, again = trained(group, 0, **make())
    resumed = load(folder, model=second, hook_state=again, group=group)
    assert resumed.step == 9 == again.steps
    agree(group, same(first, second), "loaded")
    for number in range(10, 16):
        step(second, again.inner, group.rank, number)
    agree(group, same(model, second), "trained")


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:.*random number generators are reseeded")
def test_another_number_of_ranks_begins_from_the_global_parameters(group, world, folder):
    half = group.split(0 if group.rank <= group.size // 2 else None)
    if half is not None:
        state = PowerSGDState(half, 1, start_powerSGD_iter=0, min_compression_rate=1)
        model, diloco = trained(half, 7, every=3, hook=mddp.powerSGD_hook, state=state)
        save(folder, 7, model=model, hook_state=diloco, group=half)
        half.barrier()
    group.barrier()
    state = PowerSGDState(group, 1, start_powerSGD_iter=0, min_compression_rate=1)
    model, diloco = trained(group, 0, every=3, hook=mddp.powerSGD_hook, state=state)
    load(folder, model=model, hook_state=diloco, group=group)
    is_other = half is None or half.size != group.size
    if is_other:
        copies = diloco.fragments[0].global_parameters
        agree(group, all(map(torch.equal, copies, model.parameters())) and not state.error_dict)
    assert diloco.steps == 7
    for number in range(3):
        step(model, diloco.inner, group.rank, number)
    diloco.sync()
    sums = group.all_gather_object(sums_of(*model.parameters()))
    agree(group, len({str(one) for one in sums}) == 1)
    if half is not None:
        half.close()


@pytest.mark.mpi
@pytest.mark.parametrize("is_own", [True, False])
def test_errors_of_the_adaptive_hook_are_of_their_rank(group, is_own):
    state = AdaptiveState(group, ("none", "powersgd-1"))
    _, diloco = trained(group, 1, every=2, hook=mddp.adaptive_hook, state=state)
    saved = copy.deepcopy(diloco.state_dict())
    saved["hook"]["powersgd"]["error_dict"] = {"0.weight": torch.ones(12, 6)}
    saved["hook"]["decisions"] = [[["0.weight"], "powersgd-1"]]
    diloco.load_state_dict(saved | {"world_size": group.size + (not is_own)})
    kept = bool(state.error_dict), bool(state.schedule.decided)
    agree(group, kept == (is_own, is_own), str(kept))


@pytest.mark.mpi(min_size=1)
def test_states_of_another_kind_are_refused_before_anything_is_loaded(group, folder):
    model, diloco = trained(group, 2, every=2, overlap=1)
    good = copy.deepcopy(diloco.state_dict())
    before = copy.deepcopy(model)
    smaller = {name: one[..., :1] for name, one in good["global"].items()}
    for wrong in ({}, good | {"format": "other"}, good | {"global": smaller}, good | {"hook": {}}):
        with pytest.raises(ValueError, match="the state is"):
            diloco.load_state_dict(wrong)
    split, of_split = trained(group, 0, every=2, fragments=2)
    with pytest.raises(ValueError, match="other fragments"):
        of_split.load_state_dict(good)
    assert same(model, before)
    raises_on_all(
        group,
        ValueError,
        lambda: save(
            folder, 1, model=model, optimizer=diloco.inner, hook_state=diloco, group=group
        ),
        "of each rank",
    )
    del split
