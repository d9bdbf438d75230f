"""Plain data: readable with ``weights_only=True``; errors name other parts."""

import io
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from mpidist import saved_file
from mpidist.checkpoint.plain_data import require_plain


def test_what_passes_is_read_back():
    value = {
        "a": [1, 2.5, True, None, "x", b"y", 1j],
        3: (torch.ones(2), torch.float16, torch.device("cpu"), torch.Size([1])),
        "o": OrderedDict(p=torch.nn.Parameter(torch.zeros(1)), s={1, 2}),
        "c": Counter([3, 3]),
    }
    require_plain("value", value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert repr(torch.load(file, weights_only=True)) == repr(value)


def test_states_of_torchs_schedulers_are_read_back(tmp_path):
    made = {
        "StepLR": (2,),
        "MultiStepLR": ([1, 3, 3],),
        "LambdaLR": (lambda epoch: 0.9**epoch,),
        "MultiplicativeLR": (lambda epoch: 0.9,),
        "OneCycleLR": (0.1, 10),
        "CyclicLR": (0.01, 0.1),
        "CosineAnnealingLR": (10,),
        "CosineAnnealingWarmRestarts": (3,),
        "LinearLR": (),
        "ConstantLR": (),
        "PolynomialLR": (),
        "ExponentialLR": (0.9,),
        "ReduceLROnPlateau": (),
    }
    for name, arguments in made.items():
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1, momentum=0.9)
        state = getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments).state_dict()
        require_plain(name, state)
        with open(tmp_path / name, "wb") as file:
            saved_file.write(state, file)
        found = saved_file.read(tmp_path / name)
        assert found == state, name
        assert [type(value) for value in found.values()] == [type(v) for v in state.values()], name


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, np.float64(1)]}, r"v\['a'\]\[1\] is a numpy.float64"),
        ([Path("x")], r"v\[0\] is a pathlib"),
        ({(1, Path("x")): 1}, r"key .* of v\[1\] is a pathlib"),
        (namedtuple("Point", "x")(1), "v is a .*Point"),
        ({"f": len}, "builtin_function"),
    ],
)
def test_what_does_not_is_named(value, words):
    with pytest.raises(TypeError, match=words):
        require_plain("v", value)


def test_a_value_that_holds_itself():
    value: list = []
    value.append({"again": value})
    with pytest.raises(TypeError, match="holds itself"):
        require_plain("v", value)
    twice = [1]
    require_plain("v", [twice, twice])
