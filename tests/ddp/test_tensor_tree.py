"""Tensors in a module's inputs and outputs."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from mpidist.ddp.module import tensors_in, to_device

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    loss: torch.Tensor
    hidden: tuple
    name: str = "x"


def numbers(value):
    return [float(tensor) for tensor in tensors_in(value)]


def test_tensors_are_found_in_any_nesting_and_in_order():
    one, two, three, four = (torch.tensor(float(number)) for number in range(1, 5))
    nested = Output(one, (two, [None, {"a": Pair(three, "text")}]), name="x")
    assert numbers(nested) == [1, 2, 3]
    assert numbers(OrderedDict(a=nested, b=four)) == [1, 2, 3, 4]
    assert numbers([one, one]) == [1, 1]
    for nothing in (None, "text", 3, [], {}, (), Output):  # the last is a class, not an object
        assert numbers(nothing) == []


def test_moving_keeps_the_nesting_and_all_that_is_no_tensor():
    value = {"a": [torch.ones(2), 3], "b": Pair(torch.zeros(1), "text")}
    there = to_device(value, torch.device("meta"))
    assert there["a"][0].is_meta and there["b"].left.is_meta
    assert there["a"][1] == 3 and isinstance(there["b"], Pair) and there["b"].right == "text"
    assert not value["a"][0].is_meta
