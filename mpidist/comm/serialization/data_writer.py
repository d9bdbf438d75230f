"""Writer of data-only objects (``data_format``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import chain, count
from typing import Any

import msgspec
import numpy as np
import torch

from mpidist.comm.serialization import tensor_table
from mpidist.comm.serialization.data_format import (
    COMPLEX,
    DEPTH,
    DEVICE,
    DTYPE,
    DTYPE_NAMES,
    ELLIPSIS,
    FROZENSET,
    INTEGER,
    METADATA,
    NATIVE,
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
from mpidist.comm.serialization.tensor_format import Tabled
from mpidist.errors import NotPlainData

Ext = msgspec.msgpack.Ext
Extend = Callable[[object], "tuple[int, list[object] | bytes] | None"]

encode = msgspec.msgpack.Encoder().encode
_TABLED = frozenset({torch.Tensor, torch.nn.Parameter, np.ndarray, bytearray})
_CONTAINERS = frozenset({tuple, list, dict, OrderedDict, set, frozenset})
_MARKS = [Ext(OBJECT, NUMBER.pack(number)) for number in range(64)]
_SHORT = 4  # items of a list that are written one by one, whatever they are
# Raised by ``encode`` for objects of MessagePack's own types that it cannot hold.
UNENCODABLE = (OverflowError, UnicodeEncodeError, msgspec.EncodeError)
_MOST_BYTES = (1 << 32) - 1  # of a str, bytes, or what is written as one object in another


class Inexact(Exception):
    """An object would not come over as it is: a container occurs twice, or an array is strided."""


def dumps(
    obj: object,
    objects: list[Tabled],
    extend: Extend | None = None,
    *,
    checks_tensors: bool = True,
    is_exact: bool = False,
) -> bytes:
    """Write an object as data.

    Args:
        obj: None, bool, int, float, complex, str, bytes, ``...``, exact lists, tuples, dicts,
            OrderedDicts, sets and frozensets, tensors, parameters, arrays, bytearrays, numpy
            scalars, ``torch.dtype``, ``torch.device``, ``torch.Size``. A list or dict that occurs
            twice is written twice.
        objects: Receives the tensors, parameters, arrays and bytearrays, each once; the data refers
            to them by number.
        extend: Returns (code, values or bytes) of an object of a kind that the caller defines
            (codes from ``FIRST_OWN`` on), or None.
        checks_tensors: Require that the tensor table can describe the tensors. If false, the
            caller requires it.
        is_exact: Require that no container occurs twice, and that arrays are in C order, so that
            the object comes over as it is.

    Raises:
        NotPlainData: The object holds something else or itself, or is nested too deeply; the error
            has the place.
        Inexact: ``is_exact``, and the object is not so.
    """
    before = len(objects)
    try:
        if type(obj) in NATIVE:
            return encode(obj)
        return _encoded(Writer(objects, extend, checks_tensors, is_exact).convert(obj))
    except UNENCODABLE:
        del objects[before:]
    try:
        writer = Writer(objects, extend, checks_tensors, is_exact, is_careful=True)
        return _encoded(writer.convert(obj))
    except msgspec.EncodeError:
        raise NotPlainData("more than 4 GiB in one object are no plain data") from None


def _encoded(written: object) -> bytes:
    try:
        return encode(written)
    except RecursionError:
        raise NotPlainData("it is nested too deeply") from None


class Writer:
    """State of writing one object.

    Args:
        objects: See ``dumps``.
        extend: See ``dumps``.
        checks_tensors: See ``dumps``.
        is_exact: See ``dumps``.
        is_careful: Look for ints and strs that MessagePack cannot hold. They are rare, so the first
            attempt skips the search.
    """

    __slots__ = (
        "_checks_tensors",
        "_depth",
        "_extend",
        "_is_careful",
        "_numbers",
        "_objects",
        "_seen",
    )

    def __init__(
        self,
        objects: list[Tabled],
        extend: Extend | None = None,
        checks_tensors: bool = True,
        is_exact: bool = False,
        is_careful: bool = False,
    ) -> None:
        self._objects = objects
        self._numbers = {id(obj): number for number, obj in enumerate(objects)}
        self._extend = extend
        self._checks_tensors = checks_tensors
        self._seen: set[int] | None = set() if is_exact else None  # ids of containers
        self._is_careful = is_careful
        self._depth = 0

    def convert(self, obj: Any) -> object:
        """Return the object that MessagePack encodes instead of ``obj``."""
        kind = type(obj)
        if kind in NATIVE:
            return _checked(obj) if self._is_careful else obj
        if kind in _TABLED:
            return self._reference(obj)
        if self._seen is not None and kind in _CONTAINERS:
            if id(obj) in self._seen:
                raise Inexact
            self._seen.add(id(obj))
        if kind is list:
            return self._list(obj)
        if kind is dict:
            return self._dict(obj)
        write = _KINDS.get(kind)
        if write is not None:
            return write(self, obj)
        if (
            isinstance(obj, np.generic)
            and kind.__module__ == "numpy"
            and obj.dtype.name in SCALAR_DTYPES
        ):
            return Ext(SCALAR, encode([obj.dtype.name, obj.tobytes()]))
        own = None if self._extend is None else self._extend(obj)
        if own is None:
            raise NotPlainData.of(obj)
        code, values = own
        return Ext(code, values if isinstance(values, bytes) else self._nested(values))

    def _reference(self, obj: Any) -> Ext:
        number = self._numbers.get(id(obj))
        if number is None:
            described = obj
            if type(obj) is np.ndarray and not obj.flags.c_contiguous:
                if self._seen is not None:
                    raise Inexact
                described = np.ascontiguousarray(obj)
            is_checked = self._checks_tensors or not isinstance(obj, torch.Tensor)
            if is_checked and not tensor_table.is_describable(described):
                raise NotPlainData(_described(obj))
            number = self._numbers[id(obj)] = len(self._objects)
            self._objects.append(described)
        return _MARKS[number] if number < len(_MARKS) else Ext(OBJECT, NUMBER.pack(number))

    def _list(self, obj: list[Any]) -> list[object] | Ext:
        # One extension type for all items: the reader's hook runs once, not for each of them.
        kind = type(obj[0]) if len(obj) >= _SHORT else None
        written = None
        if kind is torch.Tensor:
            written = self._tensors(obj)
        elif kind is tuple and not self._is_careful:
            written = self._tuples(obj)
        return self._items(obj) if written is None else written

    def _tuples(self, obj: list[Any]) -> Ext | None:
        """Return the extension type of a list of tuples; None if it holds anything else."""
        if not {tuple}.issuperset(map(type, obj)) or not NATIVE.issuperset(
            map(type, chain.from_iterable(obj))
        ):
            return None
        if self._seen is not None:
            ids = set(map(id, obj))
            if len(ids) != len(obj) or not self._seen.isdisjoint(ids):
                raise Inexact
            self._seen |= ids
        return Ext(TUPLES, encode(obj))

    def _tensors(self, obj: list[Any]) -> Ext | None:
        """Return the range of a list's tensors; None if one occurs twice, or an item is none."""
        ids = list(map(id, obj))
        if (
            not {torch.Tensor}.issuperset(map(type, obj))
            or len(set(ids)) != len(ids)
            or not self._numbers.keys().isdisjoint(ids)
            or (self._checks_tensors and not all(map(tensor_table.is_describable, obj)))
        ):
            return None
        first = len(self._objects)
        self._numbers.update(zip(ids, count(first)))
        self._objects += obj
        return Ext(OBJECTS, RANGE.pack(first, len(obj)))

    def _items(self, items: list[object]) -> list[object]:
        """Return a list of the converted items, or ``items`` if none of them changes."""
        if not self._is_careful and NATIVE.issuperset(map(type, items)):
            return items
        self._enter()
        result = []
        place = 0
        try:
            for place, item in enumerate(items):  # noqa: B007
                result.append(self.convert(item))
        except NotPlainData as error:
            raise error.within(f"[{place}]") from None
        self._depth -= 1
        return result

    def _dict(self, obj: dict[Hashable, object]) -> dict[Hashable, object] | Ext:
        if self._is_careful or not NATIVE.issuperset(map(type, obj)):
            try:
                return Ext(PAIRS, self._nested([part for pair in obj.items() for part in pair]))
            except NotPlainData as error:
                raise _at_key(error, list(obj)) from None
        if NATIVE.issuperset(map(type, obj.values())):
            return obj
        self._enter()
        result = {}
        key = None
        try:
            for key, value in obj.items():
                result[key] = self.convert(value)
        except NotPlainData as error:
            raise error.within(f"[{key!r}]") from None
        self._depth -= 1
        return result

    def _nested(self, values: list[object]) -> bytes:
        return _encoded(self._items(values))

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEPTH:
            raise NotPlainData(f"it is nested more than {DEPTH} deep, or holds itself")

    def _tuple(self, obj: tuple[object, ...]) -> Ext:
        if not self._is_careful and NATIVE.issuperset(map(type, obj)):
            return Ext(TUPLE, encode(obj))
        return Ext(TUPLE, self._nested(list(obj)))

    def _ordered(self, obj: OrderedDict[Hashable, object]) -> Ext:
        if not obj.__dict__.keys() <= {METADATA}:
            raise NotPlainData(
                f"an OrderedDict with attributes ({', '.join(sorted(obj.__dict__))}) is no plain "
                "data"
            )
        try:
            pairs = self._items([part for pair in obj.items() for part in pair])
        except NotPlainData as error:
            raise _at_key(error, list(obj)) from None
        return Ext(ORDERED, _encoded([pairs, self.convert(obj.__dict__.get(METADATA))]))

    def _set(self, obj: set[Hashable] | frozenset[Hashable]) -> Ext:
        return Ext(SET if type(obj) is set else FROZENSET, self._nested(list(obj)))

    def _size(self, obj: torch.Size) -> Ext:
        return Ext(SIZE, encode(list(obj)))

    def _complex(self, obj: complex) -> Ext:
        return Ext(COMPLEX, TWO_FLOATS.pack(obj.real, obj.imag))

    def _ellipsis(self, obj: object) -> Ext:
        return Ext(ELLIPSIS, b"")

    def _dtype(self, obj: torch.dtype) -> Ext:
        name = DTYPE_NAMES.get(obj)
        if name is None:
            raise NotPlainData.of(obj)
        return Ext(DTYPE, name.encode())

    def _device(self, obj: torch.device) -> Ext:
        return Ext(DEVICE, encode([obj.type, obj.index]))


_KINDS: dict[type, Callable[[Writer, Any], Ext]] = {
    tuple: Writer._tuple,
    OrderedDict: Writer._ordered,
    set: Writer._set,
    frozenset: Writer._set,
    torch.Size: Writer._size,
    complex: Writer._complex,
    type(...): Writer._ellipsis,
    torch.dtype: Writer._dtype,
    torch.device: Writer._device,
}


def _described(obj: torch.Tensor | np.ndarray) -> str:
    """Return the reason why a tensor or an array is no plain data."""
    if not isinstance(obj, torch.Tensor):
        return f"an array of dtype {obj.dtype} is no plain data"
    attributes = f" with attributes ({', '.join(sorted(obj.__dict__))})" if obj.__dict__ else ""
    return f"a tensor of {obj.dtype}, {obj.layout}, on {obj.device}{attributes} is no plain data"


def _at_key(error: NotPlainData, keys: list[Hashable]) -> NotPlainData:
    """Return the error with the key in place of an index into alternating keys and values."""
    number, _, rest = error.place.partition("]")
    place = int(number[1:])
    return NotPlainData(
        error.reason,
        f"[{keys[place // 2]!r}]{rest}" if place % 2 else f" key {keys[place // 2]!r}{rest}",
    )


def _checked(obj: object) -> object:
    if type(obj) is int and not -(1 << 63) <= obj < 1 << 64:
        return Ext(INTEGER, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))
    if type(obj) is bytes and len(obj) > _MOST_BYTES:
        raise NotPlainData(f"bytes of {len(obj) / (1 << 30):.1f} GiB are no plain data")
    if type(obj) is str:
        try:
            obj.encode()
        except UnicodeEncodeError:
            return Ext(TEXT, obj.encode(errors="surrogatepass"))
    return obj
