"""Loading: every format and layout into every other, on all ranks or none; frozen parameters."""

import copy

import pytest
import torch

from mpidist.errors import DisagreementError
from mpidist.zero.optimizer import OSS
from tests.tools.support import agree, raises_on_all
from tests.zero.stateful import (
    ADAM,
    FROZEN,
    RPROP,
    SGD,
    parameters,
    parameters_of,
    same,
    same_run,
    sharded,
    take_parameters,
    train,
    whole,
)

pytestmark = pytest.mark.mpi(min_size=1)
LAYOUTS = ["greedy", "balanced", "flat"]


def fairscale_format(given):
    """Return a state dict of FairScale 0.4.13 with an older torch: step counts are numbers."""
    state = {
        number: {
            name: int(value) if name == "step" else value.clone() for name, value in held.items()
        }
        for number, held in given["state"].items()
    }
    settings = (
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
        "maximize",
    )
    old = [
        {key: value for key, value in group.items() if key not in settings}
        for group in given["param_groups"]
    ]
    return {"state": state, "param_groups": old}


@pytest.mark.parametrize("partition", LAYOUTS)
def test_training_goes_on_where_another_optimizer_saved(group, partition):
    """Loads the state of the unsharded optimizer, FairScale and another layout, and back."""
    for kind in (ADAM, SGD, RPROP):
        source = whole(kind)
        train(source, range(2), skipped=(1,))  # one parameter has no state yet
        given = source.state_dict()
        for saved in (given, fairscale_format(given) if kind is ADAM else given):
            before, target, expected = (
                copy.deepcopy(saved),
                sharded(group, kind, partition),
                copy.deepcopy(source),
            )
            train(target, range(5, 6))  # former state must go
            take_parameters(target, source)
            target.load_state_dict(saved)
            ok = same_run(target, expected, range(2, 4)) and same(saved, before)
            agree(group, ok, f"{kind[0].__name__} loaded from the unsharded optimizer")
        other = sharded(group, kind, LAYOUTS[LAYOUTS.index(partition) - 1])
        take_parameters(other, target)
        other.load_state_dict(target.state_dict(all_ranks=True))
        back = whole(kind)
        take_parameters(back, target)
        back.load_state_dict(target.state_dict(all_ranks=True))
        ok = same_run(other, expected, range(4, 5)) & all(
            map(torch.equal, parameters_of(other), parameters_of(expected))
        )
        agree(group, ok, f"{kind[0].__name__} from another layout")
        train(back, range(4, 5))
        agree(
            group,
            all(map(torch.equal, parameters_of(back), parameters_of(expected))),
            "back in the unsharded one",
        )
        found = other.state_dict(all_ranks=True)
        agree(group, same(found, back.state_dict()), "the state dicts differ")


def test_kinds_of_state_that_were_not_loaded_are_gone(group):
    optimizer = sharded(group, ADAM, "flat")
    train(optimizer, range(1))
    plain = whole((torch.optim.Adam, {"lr": 0.01}))
    train(plain, range(1))
    before = optimizer._local.flat.kinds.values()
    nbytes, kept = sum(flat.nbytes for flat in before), {flat.data_ptr() for flat in before}
    optimizer.load_state_dict(plain.state_dict())
    found = optimizer.state_dict(all_ranks=True)
    flats = optimizer._local.flat.kinds.values()
    ok = same(found, plain.state_dict()) and 3 * sum(flat.nbytes for flat in flats) == 2 * nbytes
    agree(
        group, ok and {flat.data_ptr() for flat in flats} <= kept, "the memory was not used again"
    )


def test_state_of_parameters_that_no_rank_steps_is_kept_and_handed_over(group):
    source = whole(ADAM)
    train(source, range(2))
    for partition in LAYOUTS:
        optimizer = sharded(group, ADAM, partition, frozen=True)
        take_parameters(optimizer, source)
        optimizer.load_state_dict(source.state_dict())
        found = optimizer.state_dict(all_ranks=True)
        agree(
            group,
            same(found["state"], source.state_dict()["state"]),
            f"{partition}: lost at the next save",
        )
        # With rank-local dicts as well.
        again = sharded(group, ADAM, partition, frozen=True)
        take_parameters(again, source)
        again.load_state_dict(optimizer.rank_local_state_dict())
        expected = copy.deepcopy(source)
        parameters_of(again)[FROZEN].requires_grad_(True)
        again.refresh_trainable()
        agree(
            group,
            same_run(again, expected, range(2, 4)),
            f"{partition}: not what the unfrozen parameter had",
        )
        found = again.state_dict(all_ranks=True)
        agree(
            group,
            same(found["state"], expected.state_dict()["state"]) and not again._local.deferred,
        )


def test_nothing_is_loaded_from_what_does_not_fit(group, monkeypatch):
    optimizer, other = sharded(group, ADAM, "flat"), whole(SGD)
    for one in (optimizer, other):
        train(one, range(2))
    before = optimizer.state_dict(all_ranks=True)
    good, last = copy.deepcopy(before), group.rank == group.size - 1
    fewer = copy.deepcopy(good)
    fewer["param_groups"][1]["params"].pop()
    shape, number, name, step, setting = (copy.deepcopy(good) for _ in range(5))
    del setting["param_groups"][1]["lr"]
    del step["state"][1]["step"]
    shape["state"][0]["exp_avg"] = torch.zeros(3)
    number["state"][99] = number["state"].pop(0)
    name["state"][0]["velocity"] = name["state"][0].pop("exp_avg")
    cases = [
        (fewer, "another model"),
        (shape, "another model"),
        (number, "99"),
        (name, "another class"),
        (step, "parameter 1 has no 'step', which Adam needs"),
        (setting, "Adam needs lr in each parameter group"),
        (other.state_dict(), "another class"),
        ({"state": {}}, "param_groups"),
        (None, "NoneType"),
        ({"state": [], "param_groups": []}, "a dict in 'state'"),
    ]
    for given, words in cases:
        raises_on_all(
            group, ValueError, lambda given=given: optimizer.load_state_dict(given), words
        )
    if group.size > 1:
        for given, _ in cases:  # an error on one rank only
            error = ValueError if last else DisagreementError
            raises_on_all(
                group, error, lambda given=given if last else good: optimizer.load_state_dict(given)
            )
        for given in ({**good, "state": {}}, optimizer.rank_local_state_dict()):
            raises_on_all(
                group,
                DisagreementError,
                lambda given=given if last else good: optimizer.load_state_dict(given),
            )

        def broken(state_dict):
            raise OSError("broken")

        if last:
            monkeypatch.setattr(optimizer.optim, "load_state_dict", broken)
        error = OSError if last else DisagreementError
        later = copy.deepcopy(good)
        later["state"][0]["exp_avg"].fill_(7)
        raises_on_all(group, error, lambda: optimizer.load_state_dict(later), "broken")
        monkeypatch.undo()
    own = optimizer.rank_local_state_dict()
    held = [number for number, entries in own["entries"].items() if entries]
    if last and held:
        number = held[0]
        own["entries"][number] = [entry for entry in own["entries"][number] if entry[0] != "step"]
    error = ValueError if last and held else DisagreementError
    if group.broadcast_object(bool(held), group.size - 1):
        raises_on_all(group, error, lambda: optimizer.load_state_dict(own), "has no 'step', which")
    found = optimizer.state_dict(all_ranks=True)
    agree(group, same(found, before), "half of it was loaded")
    expected = whole(ADAM)
    train(expected, range(2))
    agree(group, same_run(optimizer, expected, range(2, 3)), "the next step is another")


def test_hooks_and_tensor_settings(group):
    seen = []
    optimizer = OSS(parameters(), torch.optim.Adam, group, lr=torch.tensor(0.01))
    optimizer.register_load_state_dict_pre_hook(
        lambda own, given: {**given, "more": seen.append("before")}
    )
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda own, found: {**found, "hooked": True})
    train(optimizer, range(1))
    found = optimizer.state_dict(all_ranks=True)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    optimizer.load_state_dict(found)
    ok = (
        found["hooked"]
        and seen == ["before", "after"]
        and float(found["param_groups"][0]["lr"]) == pytest.approx(0.01)
    )
    agree(
        group, ok and float(optimizer.optim.param_groups[0]["lr"]) == pytest.approx(0.01), str(seen)
    )


def test_state_that_no_parameter_has_is_refused_where_it_would_be_lost(group):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
            return super().step(closure)

    sharded = OSS([torch.nn.Parameter(torch.ones(3))], Counting, group, lr=0.1)
    sharded.state_dict(all_ranks=True)
    sharded.step()
    for save in (
        sharded.consolidate_state_dict,
        sharded.rank_local_state_dict,
        sharded.sharded_state_dict,
    ):
        raises_on_all(group, TypeError, save, "'all'")
    sharded.step()
    agree(group, sharded.state["all"]["steps"] == 2)
