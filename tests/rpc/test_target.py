"""Names of functions in messages."""

import operator

import pytest
import torch

from mpidist.errors import MpidistError
from mpidist.rpc.message import Kind
from mpidist.rpc.target import builtin, target_of


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "torch.add"),
        (torch.ops.aten.mul, "aten::mul"),
        (torch.ops.aten.add.Tensor, "aten::add.Tensor"),
    ],
)
def test_operators_of_torch_go_by_name_and_are_found_by_it(function, name):
    kind, target, words = target_of(function)
    assert (kind, target, words) == (Kind.CALL_BUILTIN, name, name)
    assert builtin(name) is function


def test_other_functions_go_by_pickle():
    class Callable:
        def __call__(self):
            return 1

    one = Callable()
    for function, words in ((operator.add, "add"), (len, "len"), (Callable, Callable.__qualname__), (one, repr(one))):
        assert target_of(function) == (Kind.CALL_PYTHON, function, words)
    with pytest.raises(TypeError, match="callable; got 3"):
        target_of(3)


@pytest.mark.parametrize("name", ["torch.nothing_of_the_kind", "torch.Tensor", "aten::nothing_of_the_kind", "aten::add.Nothing"])
def test_what_this_torch_lacks_is_named(name):
    with pytest.raises(MpidistError, match=f'operator "{name}" is not known'):
        builtin(name)
