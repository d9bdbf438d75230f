"""Register of tags: no two uses share one; pure."""

from mpidist.comm.mpi.tags import PIECE_TAGS, Tag


def test_no_tag_has_two_uses():
    lengths = {Tag.MESSAGE_PIECE: PIECE_TAGS}
    numbers = [tag + place for tag in Tag for place in range(lengths.get(tag, 1))]
    assert sorted(numbers) == list(range(len(numbers)))
