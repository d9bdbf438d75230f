"""Post-local SGD: the averager's step is saved and loaded.

Training: ddp/hooks/test_post_localsgd.
"""

import pytest
import torch
from torch.distributed.optim import PostLocalSGDOptimizer as Theirs

import mpidist.optim
from mpidist.optim.post_localsgd import PostLocalSGDOptimizer


class Counting:
    """Averager that counts its calls."""

    step = 0

    def average_parameters(self, params):
        assert [name for group in params for name in group] and all(
            isinstance(group, dict) for group in params
        )
        self.step += 1


def test_state_holds_the_step_of_the_averager():
    assert mpidist.optim.PostLocalSGDOptimizer is PostLocalSGDOptimizer
    weight = torch.nn.Parameter(torch.ones(3))
    made = {
        kind: kind(torch.optim.SGD([weight], lr=0.1, momentum=0.9), Counting())
        for kind in (PostLocalSGDOptimizer, Theirs)
    }
    ours, theirs = made.values()
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 1, 0.5)

    def closure():
        ours.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.detach()

    losses = [float(ours.step(closure)) for _ in range(2)]
    scheduler.step()
    assert (
        losses[1] < losses[0]
        and ours.averager.step == 2
        and ours.optim.param_groups[0]["lr"] == 0.05
    )
    saved = ours.state_dict()
    assert saved["step"] == 2 and saved.keys() == theirs.state_dict().keys()
    theirs.load_state_dict(saved)
    assert theirs.averager.step == 2
    ours.averager.step = 0
    ours.load_state_dict(theirs.state_dict())
    assert ours.averager.step == 2 and "step" in saved and repr(ours) == repr(ours.optim)
    with pytest.warns(UserWarning, match="starts at 0"):
        ours.load_state_dict({name: value for name, value in saved.items() if name != "step"})
    assert ours.averager.step == 0 and list(ours.state) == [weight]
    ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(ours.param_groups) == len(ours.optim.param_groups) == 2


def test_what_it_wraps_is_checked():
    local = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer; got int"):
        PostLocalSGDOptimizer(3, Counting())
    with pytest.raises(TypeError, match="model averager; got SGD"):
        PostLocalSGDOptimizer(local, local)
