"""Flat state: one tensor for each kind and buffer, and the base optimizer's views of it."""

import torch

from mpidist.zero.shards.pieces import Piece
from mpidist.zero.state.flat_state import FlatState, Kind

CPU = torch.device("cpu")


def pieces():
    first, second = torch.nn.Parameter(torch.ones(4, 8)), torch.nn.Parameter(torch.ones(2, 3, 4, 5))
    second.data = second.data.to(memory_format=torch.channels_last)
    cut = torch.nn.Parameter(torch.ones(10))
    homeless = torch.nn.Parameter(torch.ones(4))
    return [
        Piece(0, first, 0, 32, first, (0, 0)),
        Piece(1, second, 0, 120, second, (0, 64)),
        Piece(2, torch.nn.Parameter(torch.ones(64)), 3, 13, cut, (1, 0)),
        Piece(3, homeless, 0, 4, homeless),
    ]


def test_state_of_a_pieces_shape_moves_into_the_flat_tensors_and_keeps_its_values():
    own, sizes = pieces(), [192, 64]
    state = {
        piece.tensor: {
            "step": torch.tensor(1.0),
            "a": torch.full_like(piece.tensor, number),
            "rows": torch.ones(7),
            "none": None,
        }
        for number, piece in enumerate(own)
    }
    others = {piece.number: dict(state[piece.tensor]) for piece in own}
    flat = FlatState()
    flat.flatten(own, state, sizes)
    assert set(flat.kinds) == {Kind(place, "a", torch.float32, CPU) for place in (0, 1)}
    assert [len(one) for one in flat.kinds.values()] == [192, 64]
    for piece in own[:3]:
        view = state[piece.tensor]["a"]
        assert (
            view.untyped_storage().data_ptr()
            == flat.kinds[Kind(piece.home[0], "a", torch.float32, CPU)].data_ptr()
        )
        assert view.stride() == piece.tensor.stride() and torch.equal(
            view, others[piece.number]["a"]
        )
    for piece in own:
        for name in ("step", "rows", "none"):
            assert state[piece.tensor][name] is others[piece.number][name]
    assert state[own[3].tensor]["a"] is others[3]["a"] and flat.entries == len(state)
    before = state[own[0].tensor]["a"]
    state[own[1].tensor]["b"] = torch.ones(2, 3, 4, 5, dtype=torch.bfloat16)
    flat.flatten(own, state, sizes)
    assert state[own[0].tensor]["a"] is before and Kind(0, "b", torch.bfloat16, CPU) in flat.kinds


def test_memory_of_an_earlier_state_is_taken_if_it_fits_and_dropped_if_no_kind_wants_it():
    own = pieces()[:1]
    old = FlatState()
    old.flatten(own, {own[0].tensor: {"a": torch.ones(4, 8), "gone": torch.ones(4, 8)}}, [64])
    address = old.kinds[Kind(0, "a", torch.float32, CPU)].data_ptr()
    for size, is_same in ((64, True), (128, False)):
        fresh = FlatState(spare=old.kinds)
        fresh.flatten(own, {own[0].tensor: {"a": torch.full((4, 8), 2.0)}}, [size])
        (flat,) = fresh.kinds.values()
        assert (
            (flat.data_ptr() == address) is is_same and (flat[:32] == 2).all() and not fresh._spare
        )
