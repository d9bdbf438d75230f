"""Calls of coupled programs that a signal's handler leaves at a random moment."""

import pytest
import torch

from tests.comm.coupling.programs import two
from tests.tools.interrupts import Interrupts
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)

SIZES = (10, 300_000)


@pytest.mark.parametrize("side", ["make", "take"])
@pytest.mark.parametrize("size", SIZES)
def test_a_sample_is_whole_and_comes_once(group, job, side, size):
    counts = []
    for seed in range(3):
        sent, got = set(), []
        coupled = two(job)
        with Interrupts(seed) as interrupts:
            if coupled.program == "make":
                outlet = coupled.outlet("take")
                for label in range(60):
                    field = torch.full((size,), float(label))
                    if side == "make":
                        is_left, is_sent = interrupts.left(
                            lambda o=outlet, f=field, n=label: o.put(f, label=n)
                        )
                    else:
                        is_left, is_sent = False, outlet.put(field, label=label)
                    # Memory of an interrupted put is not this program's before it has been sent.
                    del field
                    other = torch.full((size,), -1.0)
                    if not is_left:
                        assert is_sent
                        sent.add(label)
                    del other
                if side == "make":
                    while interrupts.left(lambda c=coupled: c.close())[0]:
                        pass
                else:
                    coupled.close()
            else:
                inlet = coupled.inlet("make")
                while True:
                    is_left, sample = (
                        interrupts.left(lambda i=inlet: i.get())
                        if side == "take"
                        else (False, inlet.get())
                    )
                    if is_left:
                        continue
                    if sample is None:
                        break
                    assert sample.tensors[0].eq(float(sample.label)).all(), sample
                    got.append(sample.label)
                coupled.close()
            counts.append(interrupts.count)
        every = group.all_gather_object((sent, got))
        all_sent, all_got = every[0][0], [label for _, labels in every for label in labels]
        problem = f"sent {all_sent}, not got {all_sent - set(all_got)}; got {every}"
        in_order = all(labels == sorted(labels) for _, labels in every)
        is_once = len(all_got) == len(set(all_got))
        agree(group, all_sent <= set(all_got) and in_order and is_once, problem)
    total = sum(group.all_gather_object(sum(counts)))
    agree(group, total > 0, f"{total} interrupts")
