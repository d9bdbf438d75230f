"""Each functional optimizer against torch's own, with all its options."""

from __future__ import annotations

import copy

import pytest
import torch

from mpidist.optim import functional

CASES = [
    ("SGD", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"maximize": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.3, "amsgrad": True}),
    ("AdamW", {"maximize": True}),
    (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
    ),
    ("Adagrad", {"maximize": True}),
    ("Adadelta", {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}),
    ("Adadelta", {"maximize": True}),
    ("Adamax", {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    ("Adamax", {"maximize": True}),
    ("RMSprop", {"alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1, "centered": True}),
    ("RMSprop", {"maximize": True}),
    ("Rprop", {"etas": (0.4, 1.3), "step_sizes": (1e-5, 10)}),
    ("Rprop", {"maximize": True}),
]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
SHAPES = [(5, 3), (), (67,), (0, 4)]


def parameters(**kwargs):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, **kwargs)) for shape in SHAPES
    ]


def gradients(step, some_none):
    """Return a gradient for each parameter."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [
        None if some_none and (step + number) % 4 == 0 else gradient
        for number, gradient in enumerate(made)
    ]


def pair(name, options, **torchs):
    """Return mpidist's and torch's optimizer over equal parameters."""
    mine, theirs = parameters(), parameters()
    ours = getattr(functional, name)(mine, **options)
    return ours, getattr(torch.optim, name)(theirs, **options, **torchs), mine, theirs


def step_both(ours, theirs, of_theirs, step, some_none=True):
    given = gradients(step, some_none)
    for parameter, gradient in zip(of_theirs, given, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    ours.step(given)
    theirs.step()


@pytest.mark.parametrize(
    ("name", "options"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_same_bits_as_torch_with_the_same_kernel(name, options):
    # torch's fused SGD fails if a parameter has its first gradient, and momentum, later than
    # others; ours does not fuse then.
    some_none = name != "SGD" or "momentum" not in options
    kernel = {"fused": True} if name in FUSED else {"foreach": False}
    ours, theirs, mine, of_theirs = pair(name, options, **kernel)
    for step in range(6):
        step_both(ours, theirs, of_theirs, step, some_none)
        for a, b in zip(mine, of_theirs, strict=True):
            assert torch.equal(a, b)
            assert a.grad is None
    assert not all(torch.equal(a, b) for a, b in zip(mine, parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "options"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_close_to_torchs_loop_and_its_state_loads_there(name, options):
    ours, theirs, mine, of_theirs = pair(name, options, foreach=False)
    for step in range(3):
        step_both(ours, theirs, of_theirs, step)
    # Each continues with the other's state.
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in range(3, 6):
        step_both(ours, theirs, of_theirs, step)
    for a, b in zip(mine, of_theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert set(ours.state_dict()["param_groups"][0]) == set(theirs.state_dict()["param_groups"][0])


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients(name):
    mine, theirs = (torch.nn.Embedding(6, 3, sparse=True) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    ours, torchs = (
        getattr(lib, name)(model.parameters(), lr=0.1)
        for lib, model in ((functional, mine), (torch.optim, theirs))
    )
    for step in range(3):
        theirs.zero_grad()
        theirs(torch.tensor([step, 5, 5])).square().sum().backward()
        ours.step([theirs.weight.grad.clone()])
        torchs.step()
        assert torch.equal(mine.weight, theirs.weight)


def test_sparse_gradients_are_refused_with_torchs_words():
    optimizer = functional.Adam([torch.nn.Parameter(torch.ones(3, 3))])
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step([torch.ones(3, 3).to_sparse()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(
    "name", [name for name in functional.__all__ if name not in ("FunctionalOptimizer", "Rprop")]
)
def test_other_dtypes(name, dtype):
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 7).to(dtype)) for _ in range(2))
    ours, torchs = (
        getattr(lib, name)([p]) for lib, p in ((functional, mine), (torch.optim, theirs))
    )
    for _ in range(3):
        theirs.grad = torch.linspace(2, 1, 7).to(dtype)
        ours.step([theirs.grad.clone()])
        torchs.step()
    torch.testing.assert_close(mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in functional.__all__ if name != "FunctionalOptimizer"]
)
def test_same_bits_as_torch_on_a_device(name):
    mine, theirs = (
        [torch.nn.Parameter(torch.linspace(-1, 1, size, device="cuda")) for size in (7, 200)]
        for _ in range(2)
    )
    ours, torchs = (
        getattr(lib, name)(ps) for lib, ps in ((functional, mine), (torch.optim, theirs))
    )
    for _ in range(3):
        for parameter in theirs:
            parameter.grad = parameter.detach().cos()
        ours.step([parameter.grad.clone() for parameter in theirs])
        torchs.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_every_dtype_and_size_steps_as_torchs_loop(name, dtype):
    """Sizes around those of a vector register, where a kernel has a loop and a rest."""
    options = {"SGD": {"momentum": 0.9}, "Rprop": {}}.get(name, {"eps": 1e-4})
    options = {"lr": 0.1, **options}
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(size, generator=generator).to(dtype) for size in range(1, 301)]
    mine = [torch.nn.Parameter(start.clone()) for start in starts]
    theirs = [torch.nn.Parameter(start.clone()) for start in starts]
    ours = getattr(functional, name)(mine, **options)
    loop = {"foreach": False, **({"fused": False} if name in FUSED else {})}
    torchs = getattr(torch.optim, name)(theirs, **options, **loop)
    for _ in range(3):
        found = [torch.randn(start.shape, generator=generator).to(dtype) for start in starts]
        ours.step(found)
        for parameter, gradient in zip(theirs, found, strict=True):
            parameter.grad = gradient
        torchs.step()
    # Below float32 both take the same loop.
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13}.get(dtype, 0.0)
    wrong = [
        one.numel()
        for one, other in zip(mine, theirs, strict=True)
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance)
    ]
    assert not wrong
