"""Register of tags: no two uses share one; pure."""

from mpidist.comm.mpi.tags import PIECE_TAGS, Tag


def test_each_use_has_a_tag_and_the_pieces_tags_are_the_last():
    numbers = [int(tag) for tag in Tag]
    assert sorted(numbers) == list(range(len(numbers))) and PIECE_TAGS > 1
    assert max(Tag) is Tag.MESSAGE_PIECE
