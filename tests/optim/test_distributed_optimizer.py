"""DistributedOptimizer over parameters of all workers, against one of torch's in one process."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch.optim import lr_scheduler

import mpidist.rpc as rpc
from mpidist.errors import MpidistError, WorkerErrors
from mpidist.optim import DistributedOptimizer, functional, local, register_functional_optim
from tests.optim import owners
from tests.optim.owners import on_rank_0
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("given")]


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(2, 3, generator=generator),
        torch.randn(2, generator=generator),
        torch.randn(4, generator=generator),
    ]


class Case:
    """A module and a parameter on each worker, and copies of all in this process."""

    def __init__(self, workers):
        self.modules = [rpc.remote(name, owners.module, args=(3,)) for name in workers]
        self.parameters = [
            rpc.remote(name, owners.parameter, args=([1.0, 2.0, 3.0, 4.0],)) for name in workers
        ]
        self.rrefs = [*self.modules, *self.parameters]
        own = [list(owners.module(3).parameters()) for _ in workers]
        self.copies = [
            *(each for pair in own for each in pair),
            *(owners.parameter([1.0, 2.0, 3.0, 4.0]) for _ in workers),
        ]
        self.given = []

    def give(self, step):
        """Set gradients in context 1 on all workers; return them in the order of the copies."""
        given = []
        for number, rref in enumerate(self.rrefs):
            weight, bias, other = gradients(100 * step + number)
            new = (weight, bias) if number < len(self.modules) else (other,)
            rpc.rpc_sync(rref.owner(), owners.give, args=(rref, 1, *new))
            given += new
        return given

    def values(self):
        return [
            value
            for rref in self.rrefs
            for value in rpc.rpc_sync(rref.owner(), owners.values, args=(rref,))
        ]

    def equal(self):
        return all(torch.equal(a, b) for a, b in zip(self.values(), self.copies, strict=True))


@pytest.mark.parametrize(
    ("of_torch", "ours", "options"),
    [
        (torch.optim.SGD, functional.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, functional.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.Rprop, functional.Rprop, {"lr": 0.1}),
    ],
)
def test_same_bits_as_in_one_process(group, workers, of_torch, ours, options):
    def run():
        case = Case(workers)
        there, here = (
            DistributedOptimizer(of_torch, case.rrefs, **options),
            ours(case.copies, **options),
        )
        for step in range(3):
            here.step(case.give(step))
            there.step(1)
            assert case.equal()
        assert there.is_functional_optim
        assert len(there.remote_optimizers) == len(workers)

    on_rank_0(group, run)


def test_names_of_parameters_in_a_group_are_not_sent_as_a_setting(group, workers):
    def run():
        case = Case(workers)
        names = [str(number) for number in range(len(case.rrefs))]
        groups = [{"params": case.rrefs, "param_names": names}]
        there = DistributedOptimizer(torch.optim.SGD, groups, lr=0.1)
        here = functional.SGD(case.copies, lr=0.1)
        for step in range(2):
            here.step(case.give(step))
            there.step(1)
        assert case.equal()

    on_rank_0(group, run)


def test_parameters_without_a_gradient_are_left_alone(group, workers):
    def run():
        rrefs = [rpc.remote(name, owners.parameter, args=([1.0, 2.0], False)) for name in workers]
        optimizer = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.5, weight_decay=0.5)
        optimizer.step(2)
        assert all(rref.to_here().tolist() == [1.0, 2.0] for rref in rrefs)
        assert optimizer.state_dict()["state"] == {}

    on_rank_0(group, run)


def test_state_goes_to_one_process_and_back(group, workers):
    def run():
        case = Case(workers)
        there = DistributedOptimizer(torch.optim.Adam, case.rrefs, lr=0.1)
        here = functional.Adam(case.copies, lr=0.2)
        for step in range(2):
            given = case.give(step)
            there.step(1)
        for own, value in zip(case.copies, case.values(), strict=True):
            own.data.copy_(value)
        saved = there.state_dict()
        kept = copy.deepcopy(saved)
        here.load_state_dict(copy.deepcopy(saved))
        for _ in range(2):
            here.step(given)
            there.step(1)
            assert case.equal()
        assert torch.equal(saved["state"][0]["exp_avg"], kept["state"][0]["exp_avg"])
        # Another optimizer over the same parameters continues from this state.
        again = DistributedOptimizer(torch.optim.Adam, case.rrefs, lr=0.7)
        again.load_state_dict(here.state_dict())
        assert again.param_groups[0]["lr"] == 0.1
        here.step(given)
        again.step(1)
        assert case.equal()

    on_rank_0(group, run)


def test_a_state_of_another_layout_is_refused(group, workers):
    def run():
        case = Case(workers)
        optimizer = DistributedOptimizer(torch.optim.SGD, case.rrefs, momentum=0.5)
        fewer = DistributedOptimizer(torch.optim.SGD, case.parameters).state_dict()
        with pytest.raises(
            ValueError, match=f"group 0 has {len(workers)} parameters, not {3 * len(workers)}"
        ):
            optimizer.load_state_dict(fewer)
        with pytest.raises(ValueError, match="different number of parameter groups: 2, not 1"):
            optimizer.load_state_dict({"state": {}, "param_groups": fewer["param_groups"] * 2})

    on_rank_0(group, run)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RAdam])
def test_a_state_that_lacks_a_name_is_refused_before_any_owner_loads(group, workers, kind):
    def run():
        case = Case(workers)
        optimizer = DistributedOptimizer(kind, case.rrefs)
        case.give(0)
        optimizer.step(1)
        before = optimizer.state_dict()
        wrong, last = copy.deepcopy(before), len(before["state"]) - 1
        for values in wrong["state"].values():
            values["exp_avg"].fill_(9)
        del wrong["state"][last]["step"]
        with pytest.raises(
            ValueError, match=f"parameter {last} has no 'step', which {kind.__name__}"
        ):
            optimizer.load_state_dict(wrong)
        wrong["state"][last] = before["state"][last]
        del wrong["param_groups"][0]["lr"]
        with pytest.raises(ValueError, match=f"{kind.__name__} needs lr in each parameter group"):
            optimizer.load_state_dict(wrong)
        now = optimizer.state_dict()["state"]
        assert all(
            torch.equal(now[number][name], value)
            for number, values in before["state"].items()
            for name, value in values.items()
        )

    on_rank_0(group, run)


def test_a_setting_that_is_deleted_is_named_by_the_next_step(group, workers):
    """torch's optimizer would raise; the owners would go on with the value that they have."""

    def run():
        case = Case(workers)
        optimizer = DistributedOptimizer(torch.optim.SGD, case.rrefs, lr=0.1)
        given, before = case.give(0), case.values()
        del optimizer.param_groups[0]["lr"]
        with pytest.raises(KeyError, match=r"'lr' is missing in param_groups\[0\]"):
            optimizer.step(1)
        assert all(map(torch.equal, before, case.values()))
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step(1)
        functional.SGD(case.copies, lr=0.5).step(given)
        assert case.equal()

    on_rank_0(group, run)


def test_groups_and_what_is_added_later(group, workers):
    def run():
        case = Case(workers)
        groups = [
            {"params": case.modules[:1]},
            {"params": case.modules[1:] + case.parameters, "lr": 0.5},
        ]
        there = DistributedOptimizer(torch.optim.SGD, groups, lr=0.1, momentum=0.9)
        count = 2 * len(workers)
        here = functional.SGD(
            [{"params": case.copies[:2]}, {"params": case.copies[2:], "lr": 0.5}],
            lr=0.1,
            momentum=0.9,
        )
        here.step(case.give(0))
        there.step(1)
        late = [
            rpc.remote(name, owners.parameter, args=([1.0, 2.0, 3.0, 4.0],)) for name in workers
        ]
        there.add_param_group({"params": late, "lr": 0.25})
        case.rrefs += late
        case.copies += [owners.parameter([1.0, 2.0, 3.0, 4.0]) for _ in workers]
        here.add_param_group({"params": case.copies[-len(workers) :], "lr": 0.25})
        for step in range(1, 3):
            there.param_groups[2]["lr"] = here.param_groups[2]["lr"] = 0.3 / step
            here.step(case.give(step))
            there.step(1)
            assert case.equal()
        assert [group["lr"] for group in there.param_groups] == [0.1, 0.5, 0.15]
        saved = there.state_dict()
        assert [len(group["params"]) for group in saved["param_groups"]] == [
            2,
            count - 2 + len(workers),
            len(workers),
        ]
        here.load_state_dict(saved)

    on_rank_0(group, run)


def test_an_owner_that_has_none_yet_gets_an_optimizer_for_a_group(group, workers):
    def run():
        first, last = (
            rpc.remote(name, owners.parameter, args=([1.0],)) for name in (workers[0], workers[-1])
        )
        optimizer = DistributedOptimizer(torch.optim.SGD, [first], lr=0.5)
        optimizer.add_param_group({"params": last})
        for rref in (first, last):
            rpc.rpc_sync(rref.owner(), owners.give, args=(rref, 1, torch.ones(1)))
        optimizer.step(1)
        assert [rref.to_here().item() for rref in (first, last)] == [0.5, 0.5]

    on_rank_0(group, run)


def test_a_group_that_one_owner_refuses_is_added_nowhere(group, workers):
    def run():
        case = Case(workers)
        optimizer = DistributedOptimizer(torch.optim.SGD, case.modules, lr=0.5)
        wrong = rpc.remote(workers[-1], len, args=([],))
        with pytest.raises(
            WorkerErrors,
            match=rf"{workers[-1]} .*references to parameters or modules; .* one to a int",
        ):
            optimizer.add_param_group({"params": [*case.parameters, wrong]})
        before = [parameter.to_here().detach().clone() for parameter in case.parameters]
        case.give(0)
        optimizer.step(1)
        assert all(
            torch.equal(a, b.to_here()) for a, b in zip(before, case.parameters, strict=True)
        )
        optimizer.add_param_group({"params": case.parameters})
        optimizer.step(1)
        assert not any(
            torch.equal(a, b.to_here()) for a, b in zip(before, case.parameters, strict=True)
        )
        assert set(optimizer.state_dict()["param_groups"][1]["params"]) == set(
            range(2 * len(workers), 3 * len(workers))
        )

    on_rank_0(group, run)


@pytest.mark.parametrize(
    "scheduled",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5),
    ],
    ids=["StepLR", "CosineAnnealingLR", "LambdaLR", "ReduceLROnPlateau", "OneCycleLR"],
)
def test_torchs_schedulers(group, workers, scheduled, recwarn):
    def run():
        case = Case(workers)
        there = DistributedOptimizer(torch.optim.SGD, case.rrefs, lr=0.1, momentum=0.9)
        here = functional.SGD(case.copies, lr=0.1, momentum=0.9)
        schedulers = [scheduled(there), scheduled(here)]
        for step in range(4):
            here.step(case.give(step))
            there.step(1)
            for scheduler in schedulers:
                scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            assert case.equal()
        assert there.param_groups[0]["lr"] == here.param_groups[0]["lr"] != 0.1
        assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]

    on_rank_0(group, run)


def test_a_learning_rate_that_is_a_tensor_and_changed_in_place(group, workers):
    def run():
        rref = rpc.remote(workers[-1], owners.parameter, args=([1.0],))
        rpc.rpc_sync(rref.owner(), owners.give, args=(rref, 1, torch.ones(1)))
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=torch.tensor(0.5))
        optimizer.step(1)
        optimizer.param_groups[0]["lr"].fill_(0.25)
        optimizer.step(1)
        assert rref.to_here().item() == 0.25

    on_rank_0(group, run)


def test_clip_grad_norm(group, workers):
    def run():
        case = Case(workers)
        optimizer = DistributedOptimizer(torch.optim.SGD, case.rrefs)
        for max_norm, norm_type in [(0.5, 1.0), (0.5, 2.0), (0.25, float("inf")), (1e6, 2.0)]:
            for own, gradient in zip(case.copies, case.give(0), strict=True):
                own.grad = gradient.clone()
            expected = torch.nn.utils.clip_grad_norm_(case.copies, max_norm, norm_type)
            torch.testing.assert_close(optimizer.clip_grad_norm_(1, max_norm, norm_type), expected)
            for own, rref in zip(case.copies[2 * len(workers) :], case.parameters, strict=True):
                found = rpc.rpc_sync(rref.owner(), owners.given_gradient, args=(rref, 1))
                torch.testing.assert_close(found, own.grad)

    on_rank_0(group, run)


def test_a_norm_that_is_not_finite(group, workers):
    def run():
        rref = rpc.remote(workers[-1], owners.parameter, args=([1.0],))
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref])
        rpc.rpc_sync(rref.owner(), owners.give, args=(rref, 1, torch.tensor([torch.inf])))
        with pytest.raises(RuntimeError, match="non-finite"):
            optimizer.clip_grad_norm_(1, 1.0, error_if_nonfinite=True)
        assert rpc.rpc_sync(rref.owner(), owners.given_gradient, args=(rref, 1)).isinf()
        assert optimizer.clip_grad_norm_(1, 1.0).isinf()
        assert rpc.rpc_sync(rref.owner(), owners.given_gradient, args=(rref, 1)).isnan()

    on_rank_0(group, run)


def test_a_class_without_a_functional_form(group, workers):
    def run():
        rrefs = [rpc.remote(name, owners.parameter, args=([1.0],)) for name in workers]
        optimizer = DistributedOptimizer(owners.Halving, rrefs, lr=1.0)
        for rref in rrefs:
            rpc.rpc_sync(rref.owner(), owners.give, args=(rref, 1, torch.full((1,), 0.25)))
            rpc.rpc_sync(rref.owner(), owners.set_grad, args=(rref, torch.full((1,), 9.0)))
        optimizer.step(1)
        optimizer.param_groups[0]["lr"] = 2.0
        optimizer.step(1)
        assert not optimizer.is_functional_optim
        assert [rref.to_here().item() for rref in rrefs] == [0.25] * len(rrefs)
        assert [
            rpc.rpc_sync(rref.owner(), owners.grad_attributes, args=(rref,)) for rref in rrefs
        ] == [[9.0]] * len(rrefs)
        assert optimizer.state_dict()["state"] == {
            number: {"steps": 2} for number in range(len(rrefs))
        }

    on_rank_0(group, run)


def test_trainers_steps_are_serialised_on_each_worker(group, workers):
    """All ranks train one parameter at the same time; Halving raises if two are in a step."""
    rref = None
    if group.rank == 0:
        rref = rpc.remote(workers[-1], owners.parameter, args=([100.0],))
        rpc.rpc_sync(rref.owner(), owners.give, args=(rref, 1, torch.ones(1)))
        for name in workers[1:]:
            rpc.rpc_sync(name, keep, args=(rref,))
        keep(rref)
    group.barrier()
    optimizer = DistributedOptimizer(owners.Halving, [_kept.pop()], lr=1.0)
    text = ""
    try:
        for _ in range(10):
            optimizer.step(1)
    except WorkerErrors as error:
        text = str(error)
    agree(group, not text, text)
    on_rank_0(group, lambda: check(rref.to_here().item(), 100.0 - 10 * group.size))


_kept = []


def keep(value):
    _kept.append(value)


def check(found, expected):
    assert found == expected


def test_one_optimizer_from_several_threads(group, workers):
    def run():
        case = Case(workers)
        case.give(0)
        optimizer = DistributedOptimizer(torch.optim.SGD, case.rrefs, lr=0.5)
        before = case.values()
        threads = [threading.Thread(target=optimizer.step, args=(1,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        changes = [a - b for a, b in zip(before, case.values(), strict=True)]
        for change, gradient in zip(changes, case.give(0), strict=True):
            torch.testing.assert_close(change, 1.5 * gradient)

    on_rank_0(group, run)


def test_a_registered_functional_optimizer_with_no_more_than_a_step(group, workers):
    register_functional_optim("signs", owners.Signs)

    def run():
        rref = rpc.remote(workers[-1], owners.parameter, args=([1.0],))
        rpc.rpc_sync(rref.owner(), owners.give, args=(rref, 1, torch.ones(1)))
        optimizer = DistributedOptimizer("signs", [rref], step=0.5)
        optimizer.step(1)
        assert rref.to_here().item() == 0.5
        assert optimizer.zero_grad() is None
        with pytest.raises(
            WorkerErrors, match=r"Signs, a registered functional optimizer, has no state_dict"
        ):
            optimizer.state_dict()
        optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(WorkerErrors, match="has no param_groups"):
            optimizer.step(1)

    on_rank_0(group, run)


def test_errors_name_the_workers(group, workers):
    def run():
        rrefs = [rpc.remote(name, owners.parameter, args=([1.0],)) for name in workers]
        everywhere = "|".join(workers)
        with pytest.raises(
            WorkerErrors, match=rf"on {len(workers)} of .*({everywhere}).*Error creating optimizer."
        ) as made:
            DistributedOptimizer(owners.FailsToBeMade, rrefs)
        assert set(made.value.errors) == set(workers)
        with pytest.raises(WorkerErrors, match=r"TypeError: .*speed"):
            DistributedOptimizer(torch.optim.SGD, rrefs, speed=1)
        with pytest.raises(WorkerErrors, match="Error running optimizer") as stepped:
            DistributedOptimizer(owners.FailsInStep, rrefs).step(1)
        assert isinstance(stepped.value.__cause__, ValueError)
        with pytest.raises(MpidistError, match="Could not find autograd context with id: 77"):
            DistributedOptimizer(torch.optim.SGD, rrefs).step(77)

    on_rank_0(group, run)


def test_workers_with_a_list_of_what_is_allowed(group):
    """One module in the allowlist allows this library's optimizers; others need their own entry."""
    rpc.init_rpc(
        f"worker{group.rank}",
        group=group,
        allowed=["mpidist.optim.local", "tests.optim.owners.parameter"],
    )

    def run():
        rref = rpc.remote(f"worker{group.size - 1}", owners.parameter, args=([1.0, 2.0],))
        optimizer = DistributedOptimizer(
            torch.optim.Adam, [{"params": [rref], "lr": 0.5}], betas=(0.5, 0.6)
        )
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.step(1)
        optimizer.clip_grad_norm_(1, 1.0)
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(
            WorkerErrors,
            match=r'"tests.optim.owners.Halving" may not be named: it is not in the list',
        ):
            DistributedOptimizer(owners.Halving, [rref])

    on_rank_0(group, run)
    rpc.shutdown()


def test_a_listed_class_is_not_led_behind_its_memory(group):
    """No message enables a fused kernel, or loads a state of a shape that it does not check."""
    listed = [
        "mpidist.optim.local",
        "torch.optim.Adam",
        "tests.optim.owners.parameter",
        "tests.optim.owners.give",
    ]
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=listed)

    def run():
        there, size = f"worker{group.size - 1}", 1 << 20
        rref = rpc.remote(there, owners.parameter, args=([1.0] * size,))
        rpc.rpc_sync(there, owners.give, args=(rref, 1, torch.ones(size)))
        narrow = {
            "exp_avg": torch.zeros(1),
            "exp_avg_sq": torch.zeros(1),
            "step": torch.tensor(1.0),
        }
        last = torch.zeros(size).as_strided((size,), (0,), size - 1)

        def made(fused):
            plan = torch.optim.Adam, False, [([rref], {})], (), {"lr": 0.5, "fused": fused}
            optimizer, _, settings, _ = rpc.rpc_sync(there, local.make, args=plan)
            return optimizer, settings

        optimizer, settings = made(None)
        with pytest.raises(ValueError, match="'fused' is switched on"):
            rpc.rpc_sync(
                there,
                local.load_state,
                args=(optimizer, {0: narrow}, [{**settings[0], "fused": True}]),
            )
        rpc.rpc_sync(there, local.load_state, args=(optimizer, {0: narrow}, settings))
        with pytest.raises(ValueError, match="'fused' is switched on"):
            rpc.rpc_sync(there, local.step, args=(optimizer, 1, {0: {"fused": True}}))
        optimizer, settings = made(True)
        with pytest.raises(ValueError, match="of shape"):
            rpc.rpc_sync(there, local.load_state, args=(optimizer, {0: narrow}, settings))
        wide = {"exp_avg": last, "exp_avg_sq": last, "step": torch.tensor(1.0)}
        rpc.rpc_sync(there, local.load_state, args=(optimizer, {0: wide}, settings))
        rpc.rpc_sync(there, local.step, args=(optimizer, 1, {0: {"fused": True, "lr": 0.25}}))
        state = rpc.rpc_sync(there, local.state, args=(optimizer,))[0]
        assert state["step"].item() == 2 and len(set(state["exp_avg"].tolist())) == 1

    on_rank_0(group, run)
    rpc.shutdown()


@pytest.mark.parametrize("name", ["Adam", "OwnAdam"])
def test_the_fused_kernel_of_the_constructor_stays_over_a_saved_state(group, workers, name):
    def run():
        case = Case(workers)
        kind = owners.OwnAdam if name == "OwnAdam" else torch.optim.Adam
        here, there = (
            torch.optim.Adam(case.copies, fused=True),
            DistributedOptimizer(kind, case.rrefs, fused=True),
        )
        for _ in range(2):
            for own, gradient in zip(case.copies, case.give(1), strict=True):
                own.grad = gradient
            here.step()
            there.step(1)
            assert case.equal()
            there.load_state_dict(there.state_dict())
        assert there.state_dict()["param_groups"][0]["fused"] is True

    on_rank_0(group, run)


def test_what_is_refused(group, workers):
    def run():
        rref = rpc.remote(workers[-1], owners.parameter, args=([1.0],))
        for arguments, error, words in [
            ((torch.optim.SGD, []), ValueError, "empty parameter list"),
            ((torch.optim.SGD, [{"params": []}]), ValueError, "without references"),
            ((torch.optim.SGD, rref), TypeError, "got a single RRef"),
            ((torch.optim.SGD, [torch.ones(1)]), TypeError, "takes references"),
            ((torch.nn.Linear, [rref]), TypeError, "optimizer_class is a subclass"),
            (("unknown", [rref]), TypeError, "optimizer_class is a subclass"),
            ((torch.optim.LBFGS, [rref]), TypeError, "closure"),
            (
                (torch.optim.SGD, [rpc.remote(workers[-1], torch.nn.ReLU)]),
                ValueError,
                "no parameters",
            ),
            ((torch.optim.SGD, [rref, rref]), WorkerErrors, "twice"),
            (
                (torch.optim.SGD, [rpc.remote(workers[-1], len, args=([],))]),
                WorkerErrors,
                "one to a int",
            ),
        ]:
            with pytest.raises(error, match=words):
                DistributedOptimizer(*arguments)

    on_rank_0(group, run)
