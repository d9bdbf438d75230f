"""Plain data with marks: the skeleton of an object that contains tensors and references.

Plain data is None, bool, int, float, complex, str, bytes, ``...``, and exact tuples, lists, dicts,
sets and frozensets of it. A mark replaces each tensor, parameter, array, bytearray and remote
reference; encoder and decoder visit the marks in the same order. A list or dict that occurs twice
is one object after decoding, too. Data that contains itself, is nested more than ``DEPTH`` deep, or
has a set within a set (also in a tuple) is not plain.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, type(...)})
# A value that marshal can write and that is not plain data, so that users' data cannot contain it.
MARK = StopIteration
DEPTH = 200
_OBJECTS = frozenset({torch.Tensor, torch.nn.Parameter, np.ndarray, bytearray})


class NotPlain(Exception):
    """The object is not plain data, or contains itself."""


class Walk:
    """Traversal of one object for encoding.

    Args:
        marked: A class whose instances are replaced by marks, besides tensors and arrays.
        met: Collects the replaced objects, in order.
    """

    __slots__ = ("_depth", "_is_in_set", "_marked", "_met", "_seen")

    def __init__(self, marked: type, met: list[object]) -> None:
        self._marked = marked
        self._met = met
        self._seen: dict[int, object] = {}
        self._depth = 0
        self._is_in_set = False

    def replace(self, obj: Any) -> object:
        """Return the object with tensors, arrays and references replaced by marks.

        Raises:
            NotPlain: The object is not plain data.
        """
        kind = type(obj)
        if kind in _OBJECTS or isinstance(obj, self._marked):
            self._met.append(obj)
            return MARK
        if kind is tuple or kind is list:
            if SCALARS.issuperset(map(type, obj)):
                return obj
        elif kind is dict:
            if SCALARS.issuperset(map(type, obj)) and SCALARS.issuperset(map(type, obj.values())):
                return obj
        elif kind is set or kind is frozenset:
            if self._is_in_set:
                # marshal writes each member of a set twice, for sorting, so the time for nested
                # sets is exponential in their depth.
                raise NotPlain
            if not SCALARS.issuperset(map(type, obj)):
                self._require_no_sets(obj)
            return obj
        else:
            raise NotPlain
        return self._container(obj, kind)

    def _container(self, obj: Any, kind: type) -> object:
        seen = self._seen.get(id(obj), MARK)
        if seen is not MARK:
            if seen is None:
                raise NotPlain  # contains itself
            return seen
        self._seen[id(obj)] = None
        self._depth += 1
        if self._depth > DEPTH:
            raise NotPlain
        before = len(self._met)
        replaced: Any
        if kind is dict:
            if not SCALARS.issuperset(map(type, obj)):
                self._require_plain(obj)
            replaced = {
                key: value if type(value) in SCALARS else self.replace(value)
                for key, value in obj.items()
            }
        else:
            replaced = [item if type(item) in SCALARS else self.replace(item) for item in obj]
            if kind is tuple:
                replaced = tuple(replaced)
        values, originals = (replaced.values(), obj.values()) if kind is dict else (replaced, obj)
        if len(self._met) == before and all(map(operator.is_, originals, values)):
            replaced = obj
        self._depth -= 1
        self._seen[id(obj)] = replaced
        return replaced

    def _require_no_sets(self, members: Iterable[object]) -> None:
        # A tuple outside of sets may contain a set, so results from there are not valid here.
        seen, self._seen = self._seen, {}
        self._is_in_set = True
        self._require_plain(members)
        self._is_in_set = False
        self._seen = seen

    def _require_plain(self, items: Iterable[object]) -> None:
        # Keys and members of sets have no defined order, so they must not contain marks.
        before = len(self._met)
        for item in items:
            if type(item) not in SCALARS:
                self.replace(item)
        if len(self._met) != before:
            raise NotPlain


class Filling:
    """Traversal of decoded data: replaces marks by objects, in the encoder's order."""

    __slots__ = ("_following", "_seen")

    def __init__(self, following: Iterator[object]) -> None:
        self._following = following
        self._seen: dict[int, Any] = {}

    def fill(self, data: Any) -> object:
        """Return a container with its marks replaced; lists and dicts are changed in place."""
        kind = type(data)
        if kind is tuple:
            if id(data) in self._seen:
                return self._seen[id(data)][1]
            replaced = tuple(
                [item if type(item) in SCALARS else self._value(item) for item in data]
            )
            # The tuple is kept as well, so that its id is not used again.
            self._seen[id(data)] = data, replaced
            return replaced
        if id(data) in self._seen:
            return data
        self._seen[id(data)] = data
        if kind is list:
            data[:] = [item if type(item) in SCALARS else self._value(item) for item in data]
        elif kind is dict:
            for key, value in data.items():
                if type(value) not in SCALARS:
                    data[key] = self._value(value)
        return data

    def _value(self, item: object) -> object:
        return next(self._following) if item is MARK else self.fill(item)
