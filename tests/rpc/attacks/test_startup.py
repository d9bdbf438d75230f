"""Attacks at ``init_rpc``: forged descriptions are rejected by the worker with the list."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import pytest

import mpidist.rpc as rpc
from mpidist.comm.group import ProcessGroup
from mpidist.comm.serialization import frame
from mpidist.errors import MpidistError
from mpidist.rpc import current, membership
from tests.rpc.attacks import canary, victim
from tests.tools.support import agree

ATTACKER, ATTACKED = 1, 0


class Bomb:
    """A pickle that calls a function outside of the list."""

    def __reduce__(self) -> Any:
        return canary.fire, ("start-up",)


def descriptions(generation: int) -> dict[str, Any]:
    """Return forged descriptions by name: an honest one, changed in one place."""
    name, maps = "worker1", {"worker0": {0: 0}}
    return {
        "nothing": None,
        "number": 5,
        "text": "abcde",
        "too_few": [name, generation, {}, 2],
        "too_many": [name, generation, {}, 2, False, None, 1],
        "dict": {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6},
        "name_number": [5, generation, {}, 2, False, None],
        "name_bytes": [b"worker1", generation, {}, 2, False, None],
        "name_empty": ["", generation, {}, 2, False, None],
        "name_long": ["w" * 1_000_000, generation, {}, 2, False, None],
        "name_path": ["../../worker1", generation, {}, 2, False, None],
        "name_format": ["{0.__class__}", generation, {}, 2, False, None],
        "name_newline": ["worker1\nERROR forged line", generation, {}, 2, False, None],
        "name_taken": ["worker0", generation, {}, 2, False, None],
        "generation_bool": [name, True, {}, 2, False, None],
        "generation_text": [name, str(generation), {}, 2, False, None],
        "generation_other": [name, generation + 1, {}, 2, False, None],
        "generation_huge": [name, 1 << 70, {}, 2, False, None],
        "devices_bool": [name, generation, {}, True, False, None],
        "devices_text": [name, generation, {}, "2", False, None],
        "devices_missing": [name, generation, {"worker0": {2: -1}}, 2, False, None],
        "data_only_text": [name, generation, {}, 2, "no", None],
        "data_only_number": [name, generation, {}, 2, 2, None],
        "problem_number": [name, generation, {}, 2, False, 5],
        "problem_claimed": [name, generation, {}, 2, False, "ValueError: nothing of the kind"],
        "maps_list": [name, generation, [("worker0", {0: 0})], 2, False, None],
        "maps_number": [name, generation, {5: {0: 0}}, 2, False, None],
        "maps_text": [name, generation, {"worker0": "00"}, 2, False, None],
        "maps_unknown": [name, generation, {"worker77": {0: 0}}, 2, False, None],
        "maps_below": [name, generation, {"worker0": {-2: 0}}, 2, False, None],
        "maps_far": [name, generation, {"worker0": {0: 1 << 40}}, 2, False, None],
        "maps_bool": [name, generation, {"worker0": {True: 0}}, 2, False, None],
        "maps_float": [name, generation, {"worker0": {0: 0.0}}, 2, False, None],
        "maps_nested": [name, generation, {"worker0": {0: {0: 0}}}, 2, False, None],
        "pickle_of_maps": [name, generation, {"worker0": Bomb()}, 2, False, None],
        "pickle": Bomb(),
        "pickle_of_name": [Bomb(), generation, maps, 2, False, None],
    }


NAMES = sorted(descriptions(0))
_gather = ProcessGroup.all_gather_object


def begin(group: Any, is_attacker: bool, hostile: Any) -> BaseException | None:
    """Call ``init_rpc``, on the attacker with a forged description; return the error."""

    def gather(self: Any, obj: Any, **options: Any) -> Any:
        is_pickle = b"fire" in pickle.dumps(hostile)
        return _gather(self, hostile, data_only=not is_pickle)

    try:
        if is_attacker:
            with mock.patch.object(ProcessGroup, "all_gather_object", gather):
                rpc.init_rpc(f"worker{group.rank}", group=group)
        else:
            rpc.init_rpc(f"worker{group.rank}", group=group, allowed=victim.LISTED)
    except Exception as error:
        return error
    return None


@pytest.fixture
def generation(world):
    """Return the number of the next ``init_rpc``, and end what a test has begun."""
    known = membership._transports.get(world.world_ranks)
    yield 1 if known is None else known.generation + 1
    if current.agent is not None:
        rpc.shutdown(graceful=False)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_what_no_worker_tells(world, generation, name):
    hostile = descriptions(generation)[name]
    before = list(canary.fired)
    error = begin(world, world.rank == ATTACKER, hostile)
    is_refused = isinstance(error, MpidistError) and bool(str(error)) and current.agent is None
    agree(world, world.rank == ATTACKER or is_refused, f"{name}: {error!r}")
    # The attacker reads its own pickle.
    agree(world, world.rank == ATTACKER or canary.fired == before, "code ran that is not listed")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change", ["claims_data", "cut_off", "magic", "announces"])
def test_a_frame_that_is_none(world, generation, change):
    """Forged frames of the exchange: a pickle that claims to be data, and damaged frames."""
    before = list(canary.fired)
    encode = frame.encode

    def hostile(obj: Any, *args: Any, **options: Any) -> Any:
        header, body = encode(
            Bomb() if change == "claims_data" else ["worker1", 1, {}, 0, False, None], *args[:0]
        )
        header, first = bytearray(header), bytearray(body[0])
        if change == "claims_data":
            header[6] = 1
        elif change == "cut_off":
            first[-3:] = b"\xff\xff\xff"
        elif change == "magic":
            header[0] ^= 255
        else:
            first[:4] = b"\xff\xff\xff\xff"
        return bytes(header), [memoryview(first), *body[1:]]

    if world.rank == ATTACKER:
        with mock.patch.object(frame, "encode", hostile):
            error = begin_honestly(world)
    else:
        error = begin(world, False, None)
    is_refused = isinstance(error, MpidistError) and current.agent is None
    agree(world, world.rank == ATTACKER or is_refused, f"{change}: {error!r}")
    # The attacker reads its own pickle.
    agree(world, world.rank == ATTACKER or canary.fired == before, "code ran that is not listed")


def begin_honestly(group: Any) -> BaseException | None:
    """Call ``init_rpc``; return what it raised."""
    try:
        rpc.init_rpc(f"worker{group.rank}", group=group)
    except Exception as error:
        return error
    return None


@pytest.mark.mpi(min_size=2)
def test_a_claim_to_read_data_only_harms_nobody(world, generation):
    error = begin(
        world, world.rank == ATTACKER, [f"worker{ATTACKER}", generation, {}, 0, True, None]
    )
    agree(world, error is None, repr(error))
    if world.rank == ATTACKER:
        # The answer is data, which a worker without a list reads as well.
        assert rpc.rpc_sync(ATTACKED, victim.touched, args=(1,)) == ["1"]
    world.barrier()
