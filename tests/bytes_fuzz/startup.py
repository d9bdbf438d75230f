"""Frames that ranks exchange in ``init_rpc``, and their content."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import strategies as st

from mpidist.comm.serialization import frame
from mpidist.comm.serialization.tensor_format import HOST
from mpidist.errors import MpidistError
from mpidist.rpc.membership import gather_workers
from tests.bytes_fuzz import payloads

_DESCRIPTIONS: list[Any] = [
    ["worker1", 1, {}, 0, False, None],
    ["worker1", 1, {"worker0": {-1: -1}}, 2, True, None],
    ["a-b_c:9", 1, {"worker0": {}}, 0, False, None],
    ["worker1", 2, {}, 0, False, None],
    ["worker1", 1, {}, 0, False, "ValueError: a problem"],
    ["", 1, {}, 0, False, None],
]


class _Group:
    """A group of two: this rank, and one whose contribution is a case."""

    def __init__(self, case: bytes) -> None:
        self._case = case

    def all_gather_object(self, obj: Any, *, data_only: bool) -> list[Any]:
        """Return both contributions."""
        return [obj, frame.from_bytes(self._case, data_only=data_only)]


class _Transport:
    """The attributes of a transport that ``gather_workers`` uses."""

    generation, rank, world_ranks = 1, 0, (0, 1)

    def __init__(self, case: bytes) -> None:
        self.group: Any = _Group(case)


def samples() -> list[bytes]:
    """Return valid frames."""
    return [bytes(frame.to_bytes(described, data_only=True)) for described in _DESCRIPTIONS]


def cases(valid: tuple[bytes, ...] = ()) -> Any:
    """Return a strategy of lists of six items, any of which may be any data."""
    data = st.recursive(
        st.sampled_from(
            [
                atom
                for atom in payloads.ATOMS
                if not isinstance(atom, Exception | type) and not callable(atom)
            ][:29]
        )
        | st.integers()
        | st.text(max_size=140),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.integers() | st.text(max_size=9), inner, max_size=3)
        ),
        max_leaves=5,
    )
    maps = st.dictionaries(
        st.sampled_from(["worker0", "worker1", "x"]),
        st.dictionaries(st.integers(-2, 300), data, max_size=3),
    )
    descriptions = st.tuples(
        st.sampled_from(["worker1", "worker0", ""]) | data,
        st.just(1) | data,
        maps | data,
        st.integers(-1, 300) | data,
        st.booleans() | data,
        st.none() | data,
    ).map(list)
    return (descriptions | data).map(lambda obj: bytes(frame.to_bytes(obj, data_only=True)))


def check(case: bytes) -> None:
    """Use a case as a contribution: one of the library's errors, or a worker and device maps."""
    transport: Any = _Transport(case)
    try:
        # A CUDA build of torch opens NVIDIA's library at each count; that is no doing of the bytes.
        with mock.patch("torch.cuda.device_count", return_value=0):
            workers, maps = gather_workers(transport, "worker0", {}, True, None)
    except MpidistError as error:
        reason = str(error)
        assert reason, "an error without a text"
        return
    name = workers.infos[1].name
    assert type(name) is str and 0 < len(name) < 128 and name != "worker0"
    assert type(maps[1]) is dict and set(maps[1]) <= {"worker0", name}
    for device_map in maps[1].values():
        assert type(device_map) is dict
        assert all(
            type(index) is int and HOST <= index < 256
            for pair in device_map.items()
            for index in pair
        )
    assert type(workers.data_only) is frozenset and workers.data_only <= {0, 1}
