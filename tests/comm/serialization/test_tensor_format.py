"""Layout of the tensor table: sizes, and numbers that stay on the wire; pure."""

import torch

from mpidist.comm.serialization import tensor_format as layout


def test_the_first_row_stands_behind_the_counts_without_a_gap():
    assert layout.FIRST.size == layout.COUNTS.size + layout.ROW.size
    assert [shape.size for shape in layout.SHAPES] == [8 * dims for dims in range(9)]


def test_a_row_begins_with_its_numbers_and_shape():
    data = layout.row(3, layout.COO, layout.INLINE, 7, (5, -1))
    assert layout.ROW.unpack_from(data) == (3, layout.COO, layout.INLINE, 2, 7)
    assert layout.SHAPES[2].unpack_from(data, layout.ROW.size) == (5, -1)
    assert len(data) == layout.ROW.size + 16


def test_forms_and_flags_are_told_apart():
    assert len({layout.DENSE, layout.ARRAY, layout.BYTEARRAY, layout.COO}) == 4
    flags = (layout.REQUIRES_GRAD, layout.WHOLE, layout.INLINE, layout.PARAMETER, layout.COALESCED)
    assert sum(flags) == 0b11111


def test_a_dtype_has_the_same_number_in_each_version():
    numbers = layout.DTYPE_NUMBERS
    assert (numbers[torch.float32], numbers[torch.uint8], numbers[torch.bool]) == (0, 7, 12)
    for dtype, number in numbers.items():
        assert layout.DTYPES[number] is dtype and layout.ITEM_BYTES[number] == dtype.itemsize
