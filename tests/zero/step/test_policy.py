"""Step policy: whose call of ``step`` takes a step, in every state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpidist.zero.step import policy as policies
from mpidist.zero.step.policy import StepPolicy


class Optimizer:
    """Stand-in for the base optimizer and, as a joinable, for the sharded one."""

    _join_config = SimpleNamespace(enable=False)

    def __init__(self):
        self.calls = []

    def step(self, **kwargs):
        self.calls.append(kwargs)
        return "stepped"


@pytest.fixture
def exchanges(monkeypatch):
    """Record of exchanges with ranks without inputs."""
    found = []
    monkeypatch.setattr(
        policies.UnevenInputs, "exchange", lambda self, has_inputs: found.append(has_inputs)
    )
    monkeypatch.setattr(policies.Join, "notify_join_context", lambda joinable: None)
    return found


def policy_of(optim):
    return StepPolicy([{"params": []}], SimpleNamespace(pieces=[]), optim)


def test_each_call_of_a_user_takes_a_step(exchanges):
    optim = Optimizer()
    policy = policy_of(optim)
    assert policy.enters(optim, None) and policy.step(a=1) == "stepped"
    assert optim.calls == [{"a": 1}] and exchanges == []
    assert policy.refusal() is None
    policy.require_unstepped("clip_grad_norm", "late")


def test_with_a_hook_a_user_steps_the_rest_and_no_closure(exchanges):
    optim = SimpleNamespace(param_groups=[], step=lambda **kwargs: "rest")
    policy = policy_of(optim)
    hook = policy.stepping_hook(lambda state, bucket: None)
    assert policy.stepping_hook(hook.hook)._steps is hook._steps
    assert policy.enters(Optimizer(), None) and policy.step() == "rest"
    assert "closure" in str(policy.refusal())
    with pytest.raises(RuntimeError, match=r"GradScaler cannot be used .* late"):
        policy.require_unstepped("GradScaler", "late")


def test_the_end_of_the_backward_pass_takes_the_step_in_the_users_place(exchanges):
    optim, module, entered = Optimizer(), torch.nn.Linear(2, 1), []
    policy = policy_of(optim)

    def step():
        entered.append(policy.enters(optim, None))
        policy.step()

    policy.complete_after(module, step)
    assert policy.enters(optim, None)  # without a hook the backward pass steps nothing
    steps = policy.stepping_hook(lambda state, bucket: None)._steps
    module(torch.ones(2)).sum().backward()
    assert entered == []  # no bucket was reduced
    with pytest.warns(UserWarning, match=r"step\(\) does nothing"):
        assert not policy.enters(optim, None)
    output = module(torch.ones(2)).sum()
    steps.record_bucket([module.weight])
    output.backward()
    assert entered == [True]
    with pytest.warns(UserWarning, match=r"step\(\) does nothing"):
        assert not policy.enters(optim, None)
    steps.record_bucket([module.weight])
    assert policy.enters(optim, None)  # a pass that was not ended


def test_a_rank_without_inputs_takes_the_step_of_the_others(exchanges):
    optim, entered = Optimizer(), []
    policy = policy_of(optim)
    policy.complete_after(torch.nn.Linear(2, 1), lambda: None)
    policy.stepping_hook(lambda state, bucket: None)
    policy.step_joined(lambda: entered.append(policy.enters(optim, None)))
    assert entered == [True] and exchanges == [False]
    with pytest.raises(ZeroDivisionError):
        policy.step_joined(lambda: 1 / 0)
    with pytest.warns(UserWarning, match=r"step\(\) does nothing"):
        assert not policy.enters(optim, None)
    assert exchanges == [False]


def test_a_rank_with_inputs_says_so_to_the_others(exchanges):
    optim, said = Optimizer(), []
    policy = policy_of(optim)
    assert policy.enters(optim, lambda: said.append("native")) and exchanges == [True]
    optim._join_config = SimpleNamespace(enable=True)  # within torch's Join
    assert policy.enters(optim, None) and exchanges == [True, True] and said == ["native"]
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter._mpidist_is_joining = True
    with pytest.raises(RuntimeError, match="was not given it"):
        StepPolicy([{"params": [parameter]}], SimpleNamespace(), optim).enters(optim, None)
