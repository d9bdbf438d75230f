"""Messages between coupled programs."""

import pytest
import torch

from mpidist.comm.coupling import messages
from mpidist.comm.coupling.messages import Form, Head


@pytest.mark.parametrize("dtype", messages.DTYPES)
def test_a_header_comes_back(dtype):
    head = Head(-7, (Form(dtype, (3, 0, 5)), Form(torch.int64, ())))
    numbers = messages.pack(head)
    assert numbers[:3] == [messages.SAMPLE, -7, 2]
    assert messages.unpack(numbers) == head


def test_the_codes_of_dtypes_are_part_of_the_format():
    assert [messages.DTYPES.index(d) for d in (torch.float32, torch.float64, torch.int64)] == [
        0,
        1,
        7,
    ]


def test_the_end_has_no_header():
    assert messages.unpack([messages.END]) is None


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [2],
        [-1, 0, 1],
        [0],
        [0, 5, 0],  # no tensor
        [0, 5, 1],
        [0, 5, 1, 0],
        [0, 5, 1, 0, 2, 3],  # a dimension is missing
        [0, 5, 1, 0, 1, -3],
        [0, 5, 1, 99, 1, 3],
        [0, 5, 1, -1, 1, 3],
        [0, 5, 1, 0, -1],
        [0, 5, 1, 0, 33, *range(33)],
        [0, 5, 1, 0, 1, 3, 4],  # one more
        [0, 5, -1],
        [0, 5, 1 << 60],
    ],
)
def test_other_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match="header"):
        messages.unpack(numbers)
