"""Modules generated from an interface: types, defaults, lifetime of the calls."""

from __future__ import annotations

import gc
from typing import Optional

import pytest
import torch
from torch import Tensor

from mpidist.nn import scripted

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")


@torch.jit.interface
class Scaled:
    # Names that could clash with those of the generated text.
    def forward(
        self,
        number: Tensor,
        call: int = 2,
        word: str = "two",
        calls: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tensor:
        pass


@torch.jit.interface
class NoForward:
    def other(self, x: Tensor) -> Tensor:
        pass


class Recorded:
    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)
        future = torch.futures.Future()
        future.set_result(args[0] * args[1])
        return future


def test_compiled_code_calls_the_function_with_its_types():
    called = Recorded()
    module = torch.jit.script(scripted.typed(Scaled, called))

    @torch.jit.script
    def run(module: Scaled, x: Tensor) -> Tensor:
        return module.forward(x, 3, "three", x)

    x = torch.ones(2)
    assert torch.equal(run(module, x), 3 * x)
    assert torch.equal(module.forward_async(x, 5, "five", None).wait(), 5 * x)
    assert [args[1:3] for args in called.calls] == [(3, "three"), (5, "five")] and called.calls[1][
        3
    ] is None
    with pytest.raises(RuntimeError, match="Expected a value of type 'int'"):
        module.forward(x, "three", "three", None)


def test_two_modules_of_one_interface_share_its_code_and_not_their_calls():
    first, second = Recorded(), Recorded()
    one, other = (torch.jit.script(scripted.typed(Scaled, called)) for called in (first, second))
    one.forward(torch.ones(1), 2, "", None)
    assert (len(first.calls), len(second.calls)) == (1, 0)
    before = len(scripted._calls)
    del one, other
    gc.collect()
    assert len(scripted._calls) == before - 2


@pytest.mark.parametrize(
    ("interface", "words"),
    [(Recorded, "decorated by @torch.jit.interface"), (NoForward, "forward")],
)
def test_what_is_no_interface_is_refused(interface, words):
    with pytest.raises(ValueError, match=words):
        scripted.typed(interface, Recorded())
