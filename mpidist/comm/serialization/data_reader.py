"""Reader of data-only objects (``data_format``); any bytes yield data or an error."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from mpidist.comm.serialization.data_format import (
    COMPLEX,
    DEPTH,
    DEVICE,
    DEVICE_TYPES,
    DTYPE,
    DTYPES_BY_NAME,
    ELLIPSIS,
    FIRST_OWN,
    FROZENSET,
    INTEGER,
    METADATA,
    NUMBER,
    OBJECT,
    OBJECTS,
    ORDERED,
    PAIRS,
    RANGE,
    SCALAR,
    SCALAR_DTYPES,
    SET,
    SIZE,
    TEXT,
    TUPLE,
    TUPLES,
    TWO_FLOATS,
)
from mpidist.comm.serialization.tensor_format import Buffer, Tabled
from mpidist.errors import FrameError, MpidistError

# Makes an object from its code, its bytes, and the function that reads an array in them.
Extend = Callable[[int, memoryview, "Callable[[memoryview], list[Any]]"], object]

_decode = msgspec.msgpack.decode
_MALFORMED = (
    msgspec.DecodeError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    LookupError,
    MemoryError,
)


def loads(data: Buffer, objects: Sequence[Tabled] = (), extend: Extend | None = None) -> Any:
    """Read an object; its memory is bounded by a multiple of the data's length.

    Args:
        data: A buffer that holds the object and nothing else.
        objects: Of the tensor table, by their numbers.
        extend: Makes an object of a kind that the caller defines.

    Raises:
        FrameError: The bytes are not data.
        MpidistError: What ``extend`` raises.
    """
    try:
        return _decode(data, ext_hook=Reader(objects, extend).extension)
    except MpidistError:
        raise
    except _MALFORMED as error:
        raise FrameError(f"{len(data)} bytes are no data: {error}") from None


def loads_plain(data: Buffer) -> Any:
    """Read an object of MessagePack's own types alone.

    Raises:
        FrameError: The bytes are not such an object.
    """
    try:
        return _decode_plain(data)
    except MpidistError:
        raise
    except _MALFORMED as error:
        raise FrameError(f"{len(data)} bytes are no plain data: {error}") from None


class Reader:
    """State of reading one object.

    Args:
        objects: See ``loads``.
        extend: See ``loads``.
    """

    __slots__ = ("_depth", "_extend", "_in_ranges", "_objects")

    def __init__(self, objects: Sequence[Tabled], extend: Extend | None) -> None:
        self._objects = objects
        self._extend = extend
        self._depth = 0
        self._in_ranges = 0  # objects of all ranges so far

    def extension(self, code: int, data: memoryview) -> object:
        """Make the object of an extension type."""
        if code == OBJECT:
            (number,) = NUMBER.unpack(data) if len(data) == NUMBER.size else (len(self._objects),)
            if number >= len(self._objects):
                raise FrameError(
                    f"a mark of an object beyond the {len(self._objects)} that came with it"
                )
            return self._objects[number]
        if code >= FIRST_OWN and self._extend is not None:
            return self._extend(code, data, self._items)
        if code == OBJECTS:
            return self._range(data)
        if (read_nested := _NESTED.get(code)) is not None:
            return read_nested(self, data)
        if (read_scalar := _SCALARS.get(code)) is not None:
            return read_scalar(data)
        raise FrameError(f"an extension type of unknown code {code}")

    def _items(self, data: memoryview) -> list[Any]:
        self._depth += 1
        if self._depth > DEPTH:
            raise FrameError(f"data nested more than {DEPTH} deep")
        items = _decode(data, ext_hook=self.extension)
        self._depth -= 1
        if type(items) is not list:
            raise FrameError("an extension type without its array")
        return items

    def _range(self, data: memoryview) -> list[Tabled]:
        first, count = RANGE.unpack(data) if len(data) == RANGE.size else (0, 0)
        # No object is in two ranges, so the lists of a message hold no more items than it has
        # objects, whatever the number of ranges.
        self._in_ranges += count
        if count == 0 or first + count > len(self._objects) or self._in_ranges > len(self._objects):
            raise FrameError(
                f"a range of {count} objects beyond the {len(self._objects)} that came with it"
            )
        return list(self._objects[first : first + count])

    def _tuples(self, data: memoryview) -> list[tuple[object, ...]]:
        items = self._items(data)
        if not {list}.issuperset(map(type, items)):
            raise FrameError("a tuple without its array")
        return list(map(tuple, items))

    def _tuple(self, data: memoryview) -> tuple[object, ...]:
        return tuple(self._items(data))

    def _set(self, data: memoryview) -> set[Hashable]:
        return set(self._items(data))

    def _frozenset(self, data: memoryview) -> frozenset[Hashable]:
        return frozenset(self._items(data))

    def _pairs(self, data: memoryview) -> dict[Hashable, object]:
        items = self._items(data)
        return dict(zip(items[::2], items[1::2], strict=True))

    def _ordered(self, data: memoryview) -> OrderedDict[Hashable, object]:
        items, metadata = self._items(data)
        if type(items) is not list:
            raise FrameError("an ordered dict without its items")
        result: OrderedDict[Hashable, object] = OrderedDict(
            zip(items[::2], items[1::2], strict=True)
        )
        if metadata is not None:
            result.__dict__[METADATA] = metadata
        return result

    def _scalar(self, data: memoryview) -> np.generic:
        name, raw = self._items(data)
        dtype = SCALAR_DTYPES[name]
        if (
            type(raw) is not bytes
            or len(raw) != dtype.itemsize
            or (dtype.kind == "b" and raw not in (b"\0", b"\1"))
        ):
            raise FrameError(f"bytes that are no numpy scalar of type {name}")
        return np.frombuffer(raw, dtype)[0]

    def _device(self, data: memoryview) -> torch.device:
        kind, index = self._items(data)
        if kind not in DEVICE_TYPES or (
            index is not None and (type(index) is not int or not 0 <= index < 128)
        ):
            raise FrameError("no device")
        return torch.device(kind) if index is None else torch.device(kind, index)

    def _size(self, data: memoryview) -> torch.Size:
        sizes = self._items(data)
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
            raise FrameError("sizes that are none")
        return torch.Size(sizes)


def _integer(data: memoryview) -> int:
    return int.from_bytes(data, "little", signed=True)


def _complex(data: memoryview) -> complex:
    if len(data) != TWO_FLOATS.size:
        raise FrameError(f"a complex number of {len(data)} bytes")
    return complex(*TWO_FLOATS.unpack(data))


def _text(data: memoryview) -> str:
    return bytes(data).decode(errors="surrogatepass")


def _ellipsis(data: memoryview) -> object:
    if len(data):
        raise FrameError(f"an ellipsis of {len(data)} bytes")
    return ...


def _dtype(data: memoryview) -> torch.dtype:
    return DTYPES_BY_NAME[bytes(data).decode()]


def _refuse(code: int, data: memoryview) -> object:
    raise FrameError(f"an extension type of code {code} in plain data")


_decode_plain = msgspec.msgpack.Decoder(ext_hook=_refuse).decode
_SCALARS: dict[int, Callable[[memoryview], object]] = {
    INTEGER: _integer,
    COMPLEX: _complex,
    TEXT: _text,
    ELLIPSIS: _ellipsis,
    DTYPE: _dtype,
}
_NESTED: dict[int, Callable[[Reader, memoryview], object]] = {
    TUPLE: Reader._tuple,
    TUPLES: Reader._tuples,
    SET: Reader._set,
    FROZENSET: Reader._frozenset,
    PAIRS: Reader._pairs,
    ORDERED: Reader._ordered,
    SCALAR: Reader._scalar,
    DEVICE: Reader._device,
    SIZE: Reader._size,
}
