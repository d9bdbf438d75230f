"""Data-only objects (``comm.serialization.data_reader``) with objects and the kinds of RPC."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mpidist.comm.serialization import data_reader, data_writer
from mpidist.errors import MpidistError
from mpidist.rpc.names.allowlist import Allowed
from mpidist.rpc.values.data_values import ExtensionReader, ExtensionWriter
from mpidist.rpc.worker import WorkerInfo
from tests.bytes_fuzz.mutations import MOST_BYTES
from tests.rpc import hostile
from tests.rpc.hostile import array, ext

_OBJECTS: list[Any] = [torch.ones(2), np.ones(3), bytearray(b"abc")]
_REFERENCES = ["a reference", "another"]
_allowed = Allowed(hostile.LISTED)
# Allowed results, by exact type.
_DATA = (
    *(
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(...),
        datetime.datetime,
        torch.dtype,
        torch.device,
    ),
    *(torch.Tensor, np.ndarray, bytearray, WorkerInfo),
)
_HOLDERS = (list, tuple, set, frozenset, torch.Size)
_LISTED = frozenset(hostile.LISTED)

ATOMS = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        1 << 62,
        -(1 << 63),
        (1 << 64) - 1,
        1 << 64,
        -(1 << 200),
        0.0,
        -0.0,
        1e300,
        float("nan"),
    ),
    *(
        "",
        "a",
        "ä€😀",
        "\udc80",
        "x" * 40,
        b"",
        b"\0" * 40,
        1 + 2j,
        ...,
        torch.float32,
        torch.device("cpu"),
        torch.device("cuda", 1),
    ),
    *(
        torch.Size([1, 2]),
        np.float64(1.5),
        np.int8(-3),
        np.bool_(True),
        np.float32(2),
        np.complex64(1j),
    ),
    *(
        WorkerInfo("worker1", 1),
        hostile.echo,
        hostile.Box,
    ),
    *_OBJECTS,
]


def written(obj: Any) -> bytes:
    """Write an object."""
    return data_writer.dumps(obj, list(_OBJECTS), ExtensionWriter(True).extend)


def samples() -> list[bytes]:
    """Return valid cases: each atom alone, and containers of atoms."""
    # Each once, because the writer numbers new tensors and arrays, and the reader has three.
    plain = [atom for atom in ATOMS if not any(atom is obj for obj in _OBJECTS)]
    nested: Any = [[]]
    for _ in range(20):
        nested = {"k": (nested, [nested[:1] if type(nested) is list else 1])}
    objects = [
        *ATOMS,
        plain,
        tuple(plain),
        {"a": 1, "b": [1, 2, {"c": (1, 2)}]},
        {1: 2, (1, 2): "x", None: ..., b"b": 1.5},
        {1, 2, "x", (3, 4)},
        frozenset({1, frozenset({2})}),
        nested,
        list(range(300)),
        [["a", "b"], 1, 2],
    ]
    return [written(obj) for obj in objects]


_codes = st.sampled_from([*range(14), *range(30, 40), -1, 127, -128])
_leaves = st.sampled_from([written(atom) for atom in ATOMS]) | st.binary(max_size=12)


def cases(valid: tuple[bytes, ...] = ()) -> Any:
    """Return a strategy of MessagePack with arbitrary extension types and wrong lengths."""
    return st.recursive(
        _leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(lambda items: array(*items)),
            st.builds(ext, _codes, inner),
            st.builds(ext, _codes, st.lists(inner, max_size=5).map(lambda items: array(*items))),
            st.builds(ext, _codes, inner, st.integers(0, 40) | st.just(0xFFFFFFFF)),
            st.tuples(inner, inner).map(lambda pair: b"\x81" + pair[0] + pair[1]),
        ),
        max_leaves=12,
    ).map(lambda case: case[:MOST_BYTES])


def check(case: bytes) -> None:
    """Read a case: one of the library's errors, or data of at most as many items as bytes."""
    fired = len(hostile.fired)
    try:
        obj = data_reader.loads(case, _OBJECTS, ExtensionReader(_REFERENCES, _allowed).extend)
    except MpidistError as error:
        reason = str(error)
        assert reason, "an error without a text"
    else:
        budget = [8 * len(case) + 64]
        _require_data(obj, budget)
    assert len(hostile.fired) == fired, f"code ran that is not listed: {hostile.fired[fired:]}"


def _require_data(obj: Any, budget: list[int]) -> None:
    budget[0] -= 1
    assert budget[0] > 0, "more objects than the case has bytes for"
    kind = type(obj)
    if kind in _DATA or (isinstance(obj, np.generic) and kind.__module__ == "numpy"):
        if kind in (str, bytes):
            assert len(obj) <= 8 * budget[0] + MOST_BYTES
        return
    if kind is dict or kind is OrderedDict:
        for key, value in obj.items():
            _require_data(key, budget)
            _require_data(value, budget)
    elif kind in _HOLDERS:
        for item in obj:
            _require_data(item, budget)
    else:
        is_listed = any(obj is item for item in _LISTED)
        assert is_listed, f"a {kind} came out of data: {obj!r:.200}"
