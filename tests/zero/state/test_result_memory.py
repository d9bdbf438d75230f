"""Memory of results: huge pages, and reuse only after the last result has been freed."""

import mmap

import pytest
import torch

from mpidist.zero.state import result_memory
from mpidist.zero.state.result_memory import KeptMemory

WANTED = {
    "a": (1000, torch.float32),
    "b": (0, torch.int64),
    "c": (3, torch.bfloat16),
    "d": (5, torch.float64),
}


def test_tensors_are_apart_aligned_and_writable():
    made = KeptMemory().tensors(WANTED)
    for number, (key, (numel, dtype)) in enumerate(WANTED.items()):
        assert made[key].dtype is dtype and made[key].shape == (numel,)
        assert made[key].data_ptr() % 64 == 0
        made[key].fill_(number)
    assert all((made[key] == number).all() for number, key in enumerate(WANTED))
    assert KeptMemory().tensors({"b": (0, torch.float32)})["b"].numel() == 0


@pytest.mark.parametrize(
    "hold",
    [
        lambda made: made["d"],
        lambda made: made["a"][7:9],
        lambda made: made["a"].numpy()[3:],
        lambda made: {"state": {0: made["c"].view(3, 1)}},
        lambda made: made["a"].untyped_storage(),
        lambda made: torch.nn.Parameter(made["a"]),
        lambda made: memoryview(made["a"].numpy()),
    ],
)
def test_memory_is_used_again_once_nobody_holds_any_of_it(hold):
    memory = KeptMemory()
    made = memory.tensors(WANTED)
    address = made["a"].data_ptr()
    held = hold(made)
    del made
    other = memory.tensors(WANTED)
    assert other["a"].data_ptr() != address, "somebody still sees it"
    del held
    address = other["a"].data_ptr()
    del other
    assert memory.tensors(WANTED)["a"].data_ptr() == address
    # More memory than the machine has.
    assert memory.tensors({"a": (1 << 20, torch.float32)})["a"].numel() == 1 << 20


def test_huge_pages_are_asked_for_and_may_be_refused(monkeypatch):
    asked = []

    class Memory(mmap.mmap):
        def madvise(self, option, *place):
            asked.append(option)
            raise OSError("no huge pages here")

    monkeypatch.setattr(result_memory.mmap, "mmap", Memory)
    assert len(result_memory._huge_pages(3 << 20)) == 3 << 20
    huge = [mmap.MADV_HUGEPAGE] if hasattr(mmap, "MADV_HUGEPAGE") else []
    assert asked == huge
    for numel, asks in ((1000, []), (1 << 20, huge)):  # a page is too large for few zeros
        asked.clear()
        zeros = result_memory.zeros(numel, torch.float32, torch.device("cpu"))
        assert (
            asked == asks
            and not zeros.any()
            and zeros.numel() == numel
            and zeros.add_(1).sum() == numel
        )
