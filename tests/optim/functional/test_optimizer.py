"""Base class of functional optimizers: aliases, kernels, arguments and errors."""

from __future__ import annotations

import pytest
import torch

from mpidist.optim import functional


def ones(*shape):
    return torch.nn.Parameter(torch.ones(shape))


def test_gradients_and_their_attribute_are_left_alone():
    parameter, gradient = ones(3), torch.ones(3)
    parameter.grad = kept = torch.full((3,), 7.0)
    optimizer = functional.SGD([parameter], lr=0.5, momentum=0.9, weight_decay=0.1)
    optimizer.step([gradient])
    optimizer.step([gradient])
    assert parameter.grad is kept
    assert torch.equal(kept, torch.full((3,), 7.0))
    assert torch.equal(gradient, torch.ones(3))


def test_none_leaves_a_parameter_and_its_state_alone():
    used, unused = ones(3), ones(3)
    optimizer = functional.Adam([used, unused], lr=0.5, weight_decay=0.5)
    optimizer.step([torch.ones(3), None])
    assert torch.equal(unused, torch.ones(3))
    assert set(optimizer.state_dict()["state"]) == {0}
    assert not torch.equal(used, torch.ones(3))


def test_a_step_counts_as_an_in_place_change():
    parameter = ones(3)
    loss = parameter.square().sum()
    functional.SGD([parameter]).step([torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_got_other_memory():
    module = torch.nn.Linear(2, 2, bias=False)
    optimizer = functional.SGD(module.parameters(), lr=1.0)
    optimizer.step([torch.zeros(2, 2)])
    module.double()
    before = module.weight.detach().clone()
    optimizer.step([torch.ones(2, 2, dtype=torch.float64)])
    assert torch.equal(module.weight, before - 1)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("fused", [None, True])
def test_parameters_and_gradients_of_other_strides(name, fused):
    """torch's fused kernels process memory in order, and pair wrong elements if strides differ."""
    mine, theirs = (
        torch.nn.Parameter(
            torch.arange(12.0).view(3, 4).t().clone(memory_format=torch.preserve_format)
        )
        for _ in "ab"
    )
    plain, torchs = ones(4, 3), ones(4, 3)
    ours = getattr(functional, name)([mine, plain], fused=fused)
    loop = getattr(torch.optim, name)([theirs, torchs], foreach=False)
    for step in range(3):
        theirs.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        torchs.grad = theirs.grad.t().reshape(3, 4).t()
        ours.step([theirs.grad, torchs.grad])
        loop.step()
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(plain, torchs)


def test_state_of_other_strides_is_laid_out_anew():
    saved = functional.Adam([torch.nn.Parameter(torch.ones(3, 4).t())])
    saved.step([torch.arange(12.0).view(4, 3)])
    parameter = ones(4, 3)
    loaded = functional.Adam([parameter])
    loaded.load_state_dict(saved.state_dict())
    loaded.step([torch.arange(12.0).view(4, 3)])
    saved.step([torch.arange(12.0).view(4, 3)])
    one_more = functional.Adam([twin := ones(4, 3)])
    for _ in range(2):
        one_more.step([torch.arange(12.0).view(4, 3)])
    torch.testing.assert_close(
        loaded.state_dict()["state"][0]["exp_avg"], one_more.state_dict()["state"][0]["exp_avg"]
    )
    assert twin.shape == parameter.shape


def test_the_kernel_is_chosen_for_one_step_alone(monkeypatch):
    from torch.optim import sgd

    used = []
    monkeypatch.setattr(sgd, "_fused_sgd", lambda *args, **kwargs: used.append("fused"))
    monkeypatch.setattr(sgd, "_single_tensor_sgd", lambda *args, **kwargs: used.append("loop"))
    dense, sparse = torch.ones(2, 2), torch.ones(2, 2).to_sparse()
    optimizer = functional.SGD([ones(2, 2)])
    for gradient in (dense, sparse, dense):
        optimizer.step([gradient])
    functional.SGD([ones(2, 2)], fused=False).step([dense])
    assert used == ["fused", "loop", "fused", "loop"]
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None


def test_groups_have_settings_of_their_own():
    first, second, third = ones(2), ones(2), ones(2)
    optimizer = functional.SGD([{"params": [first]}, {"params": second, "lr": 0.5}], lr=0.25)
    optimizer.add_param_group({"params": [third], "lr": 1.0})
    optimizer.step([torch.ones(2)] * 3)
    assert (first[0].item(), second[0].item(), third[0].item()) == (0.75, 0.5, 0.0)


def test_named_parameters():
    module = torch.nn.Linear(2, 1)
    optimizer = functional.SGD(module.named_parameters(), lr=1.0)
    optimizer.step([torch.ones(1, 2), None])
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_a_scheduler_of_torch():
    optimizer = functional.SGD([parameter := ones(2)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        optimizer.step([torch.ones(2)])
        scheduler.step()
    assert parameter[0].item() == 0.25


def test_an_error_leaves_no_gradient_behind():
    optimizer = functional.SGD([ones(2), ones(2)])
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step([torch.ones(2), torch.ones(5)])
    assert all(alias.grad is None for group in optimizer.param_groups for alias in group["params"])


PARAMETER = ones(2)


@pytest.mark.parametrize(
    ("params", "options", "error", "words"),
    [
        ([], {}, ValueError, "empty parameter list"),
        ([PARAMETER * 2], {}, ValueError, "non-leaf"),
        ([PARAMETER, PARAMETER], {}, ValueError, "twice"),
        (
            [{"params": [PARAMETER]}, {"params": [PARAMETER]}],
            {},
            ValueError,
            "more than one parameter group",
        ),
        (["weight"], {}, TypeError, "only optimize Tensors"),
        ([PARAMETER], {"lr": -1}, ValueError, "Invalid learning rate"),
        ([PARAMETER], {"speed": 1}, TypeError, "speed"),
        ([PARAMETER], {"differentiable": True}, ValueError, "differentiable"),
        ([PARAMETER], {"fused": True, "foreach": True}, RuntimeError, "cannot be `True` together"),
    ],
)
def test_what_is_refused(params, options, error, words):
    with pytest.raises(error, match=words):
        functional.Adam(params, **options)


def test_as_many_gradients_as_parameters():
    with pytest.raises(ValueError, match="needs 1 gradients"):
        functional.SGD([ones(2)]).step([])


@pytest.mark.parametrize(
    "values",
    [{"exp_avg": torch.zeros(1)}, {"exp_avg_sq": torch.zeros(0)}, {"step": torch.zeros(3)}],
)
def test_a_state_of_another_shape_is_refused(values):
    """torch's fused kernels would read and write beyond its memory."""
    parameter = ones(100_000)
    optimizer = functional.Adam([parameter])
    optimizer.step([torch.ones(100_000)])
    wrong = optimizer.state_dict()
    wrong["state"][0] = {**wrong["state"][0], **values}
    with pytest.raises(ValueError, match="for a parameter of shape"):
        optimizer.load_state_dict(wrong)
    optimizer.step([torch.ones(100_000)])
    assert optimizer.state_dict()["state"][0]["step"].item() == 2


def test_a_state_that_lacks_a_name_is_refused():
    parameter = ones(4)
    optimizer = functional.Adam([("weight", parameter)])
    optimizer.step([torch.ones(4)])
    wrong = optimizer.state_dict()
    wrong["state"][0] = {key: wrong["state"][0][key] for key in ("exp_avg", "exp_avg_sq")}
    with pytest.raises(
        ValueError, match=r"parameter 0 \('weight'\) has no 'step', which Adam needs"
    ):
        optimizer.load_state_dict(wrong)
    optimizer.step([torch.ones(4)])
    assert optimizer.state_dict()["state"][0]["step"].item() == 2


def test_the_fused_kernel_is_refused_where_elements_share_their_memory():
    """The kernel writes as many elements as the parameter has, beyond a smaller memory."""
    parameter = torch.ones(1).expand(100_000).requires_grad_()
    optimizer = functional.SGD([parameter], fused=True)
    with pytest.raises(ValueError, match="fill their memory"):
        optimizer.step([torch.ones(100_000)])
    transposed = torch.ones(3, 4).t().requires_grad_()
    functional.SGD([transposed], lr=1.0, fused=True).step([torch.ones(4, 3)])
    assert not transposed.any()
