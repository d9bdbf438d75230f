"""State of the adaptive hook: arguments, its saved form, and checkpoints of a run with it."""

from __future__ import annotations

import pytest
import torch

from mpidist import checkpoint
from mpidist.ddp.hooks.adaptive import adaptive_hook
from mpidist.ddp.hooks.adaptive_state import AdaptiveState
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import DisagreementError
from tests.ddp.hooks.test_powersgd import bucket_of
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi

NAMES = ("a", "conv", "c")
WRONG = [
    ({"candidates": ["none", "fp4"]}, ValueError, "'fp4'"),
    ({"candidates": ["none", 3]}, TypeError, "3"),
    ({"start_iter": 1.5}, TypeError, "start_iter"),
    ({"start_iter": -1}, ValueError, "start_iter"),
    ({"check_interval": 0}, ValueError, "check_interval"),
    ({"change": -0.1}, ValueError, "change"),
    ({"change": float("nan")}, ValueError, "change"),
    ({"min_compression_rate": "2"}, TypeError, "min_compression_rate"),
    ({"random_seed": None}, TypeError, "random_seed"),
]


def test_wrong_arguments_and_unequal_ones(group):
    for arguments, error, text in WRONG:
        raises_on_all(group, error, lambda a=arguments: AdaptiveState(group, **a), text)
    if group.size > 1:
        raises_on_all(
            group,
            DisagreementError,
            lambda: AdaptiveState(group, check_interval=50 + group.rank),
            "check_interval",
        )
        raises_on_all(
            group,
            DisagreementError,
            lambda: AdaptiveState(group, ["none", "bf16"] if group.rank else ["none", "uint8"]),
            "candidates",
        )

        def wrong_on_one():
            AdaptiveState(group, start_iter="2" if group.rank == 0 else 2)

        error = TypeError if group.rank == 0 else DisagreementError
        caught = None
        try:
            wrong_on_one()
        except (TypeError, DisagreementError) as raised:
            caught = raised
        agree(group, type(caught) is error and "start_iter" in str(caught), repr(caught))


def used(group):
    """Return a state that has compressed a bucket three times, and the next bucket."""
    state = AdaptiveState(group, ("none", "powersgd-2"), min_compression_rate=1)
    state.schedule.resume({NAMES: "powersgd-2"}, 1.0)
    for step in range(4):
        step_of(state, group, step)
    return state


def step_of(state, group, step):
    bucket = bucket_of(group.rank, NAMES, step)
    return adaptive_hook(state, GradBucket(bucket, 0, True)).wait()


def test_a_loaded_state_goes_on_with_the_same_bits(group, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", False)
    state = used(group)
    other = AdaptiveState(group, ("none", "bf16", "powersgd-2"), min_compression_rate=1)
    other.load_state_dict(state.state_dict())
    agree(group, other.iter == 4 and other.schedule.decided == {NAMES: "powersgd-2"})
    agree(group, group.size == 1 or set(other.error_dict) == set(NAMES))
    for step in (4, 5):
        agree(group, torch.equal(step_of(other, group, step), step_of(state, group, step)))
    # Decisions among other candidates are not taken over.
    fewer = AdaptiveState(group, ("none", "bf16"))
    fewer.load_state_dict(state.state_dict())
    agree(group, not fewer.schedule.decided and set(fewer.error_dict) == set(state.error_dict))


def test_states_of_all_ranks_for_another_number(group, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", False)
    states = group.all_gather_object(used(group).state_dict())
    merged = AdaptiveState.merged_state_dict(states)
    state = AdaptiveState(group)
    state.load_state_dict(merged)
    agree(group, state.iter == 4 and not state.schedule.decided)
    for name, error in state.error_dict.items():
        wanted = sum(one["powersgd"]["error_dict"][name] for one in states) / group.size
        agree(group, torch.allclose(error, wanted, atol=1e-6), name)
    late = [*states[:-1], {**states[-1], "iter": 7}]
    if group.size > 1:
        raises_on_all(
            group, ValueError, lambda: AdaptiveState.merged_state_dict(late), "different steps"
        )


def test_another_objects_state_is_refused(group):
    state = AdaptiveState(group)
    good = state.state_dict()
    for wrong in (
        None,
        {},
        {**good, "format": "mpidist.adaptive 0"},
        {**good, "iter": -1},
        {**good, "iter": True},
        {**good, "step_s": "1"},
        {**good, "decisions": [["a", "none"]]},
        {**good, "decisions": [[["a"], 3]]},
        {**good, "powersgd": {}},
        {**good, "more": 1},
    ):
        with pytest.raises(ValueError, match="state"):
            state.load_state_dict(wrong)
    agree(group, state.iter == 0)
    state.load_state_dict(good)


def test_checkpoints_hold_the_state(group, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", False)
    folder = group.broadcast_object(str(tmp_path_factory.mktemp("run")), 0)

    def made():
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(20, 12), process_group=group)
        state = AdaptiveState(group, ("none", "powersgd-2"), min_compression_rate=1)
        model.register_comm_hook(state, adaptive_hook)
        return model, state

    model, state = made()
    state.schedule.resume({("weight", "bias"): "powersgd-2", ("bias", "weight"): "powersgd-2"}, 1.0)
    for _ in range(3):
        model(torch.randn(4, 20)).square().sum().backward()
    checkpoint.save(folder, 3, model=model, hook_state=state, group=group)
    other_model, other = made()
    resumed = checkpoint.load(folder, model=other_model, hook_state=other, group=group)
    agree(group, resumed.step == 3 and other.iter == 3)
    agree(group, set(other.error_dict) == ({"weight"} if group.size > 1 else set()))
    same = all(torch.equal(e, state.error_dict[name]) for name, e in other.error_dict.items())
    agree(group, same and other.schedule.decided == state.schedule.decided)
    means = {name: error.clone() for name, error in sorted(state.error_dict.items())}
    for error in means.values():
        group.all_reduce(error, "avg")
    if (alone := group.new_group([0])) is not None:
        # Another number of ranks: the mean of the errors, and no decisions.
        model = DistributedDataParallel(torch.nn.Linear(20, 12), process_group=alone)
        fresh = AdaptiveState(alone)
        if group.size > 1:
            with pytest.warns(UserWarning, match="reseeded"):
                checkpoint.load(folder, model=model, hook_state=fresh, group=alone)
        close = [torch.allclose(e, means[name]) for name, e in fresh.error_dict.items()]
        alone.close()
    agree(group, group.rank > 0 or (all(close) and len(close) == len(means)), "another number")
    agree(group, group.rank > 0 or not fresh.schedule.decided)
