"""Plain data: readable with ``weights_only=True``; errors name other parts."""

import io
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from mpidist.checkpoint.plain_data import require_plain


def test_what_passes_is_read_back():
    value = {
        "a": [1, 2.5, True, None, "x", b"y", 1j],
        3: (torch.ones(2), torch.float16, torch.device("cpu"), torch.Size([1])),
        "o": OrderedDict(p=torch.nn.Parameter(torch.zeros(1)), s={1, 2}),
    }
    require_plain("value", value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert repr(torch.load(file, weights_only=True)) == repr(value)


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
