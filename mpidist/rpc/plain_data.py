"""Plain data with marks: the skeleton of an object that holds tensors and references.

Plain data is None, bool, int, float, complex, str, bytes, ``...``, and exact tuples, lists, dicts,
sets and frozensets of it. A mark stands in the place of each tensor, parameter, array, bytearray or
remote reference; encoding and decoding meet the marks in the same order. Lists and dicts that occur
twice are the same object on the other side, too. Data that holds itself, is nested more than
``DEPTH`` deep, or has a set within a set (also within its tuples) is not plain.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, type(...)})
# It can be marshalled, and is no plain data itself, so that no user's skeleton can hold it.
MARK = StopIteration
DEPTH = 200
_OBJECTS = frozenset({torch.Tensor, torch.nn.Parameter, np.ndarray, bytearray})


class NotPlain(Exception):
    """Something other than plain data, or data that holds itself."""


class Walk:
    """One encoding.

    Args:
        marked: A class whose instances are marked, beside tensors and arrays.
        met: Gets the objects that marks stand for, in order.
    """

    __slots__ = ("_depth", "_is_in_set", "_marked", "_met", "_seen")

    def __init__(self, marked: type, met: list[Any]) -> None:
        self._marked = marked
        self._met = met
        self._seen: dict[int, Any] = {}
        self._depth = 0
        self._is_in_set = False

    def replace(self, obj: Any) -> Any:
        """Return the object with marks in the places of what is no plain data itself."""
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
                # marshal writes each member of a set twice, to sort them: sets of sets would take 2
                # to the power of their depth.
                raise NotPlain
            if not SCALARS.issuperset(map(type, obj)):
                self._require_no_sets(obj)
            return obj
        else:
            raise NotPlain
        return self._container(obj, kind)

    def _container(self, obj: Any, kind: type) -> Any:
        seen = self._seen.get(id(obj), MARK)
        if seen is not MARK:
            if seen is None:
                raise NotPlain  # it holds itself
            return seen
        self._seen[id(obj)] = None
        self._depth += 1
        if self._depth > DEPTH:
            raise NotPlain
        before = len(self._met)
        made: Any
        if kind is dict:
            if not SCALARS.issuperset(map(type, obj)):
                self._require_plain(obj)
            made = {
                key: value if type(value) in SCALARS else self.replace(value)
                for key, value in obj.items()
            }
        else:
            made = [item if type(item) in SCALARS else self.replace(item) for item in obj]
            if kind is tuple:
                made = tuple(made)
        values, originals = (made.values(), obj.values()) if kind is dict else (made, obj)
        if len(self._met) == before and all(map(operator.is_, originals, values)):
            made = obj
        self._depth -= 1
        self._seen[id(obj)] = made
        return made

    def _require_no_sets(self, members: Any) -> None:
        # A tuple that was met outside may hold a set: what was seen there does not count here.
        seen, self._seen = self._seen, {}
        self._is_in_set = True
        self._require_plain(members)
        self._is_in_set = False
        self._seen = seen

    def _require_plain(self, items: Any) -> None:
        # Keys and members of sets: data without marks, whose order nothing tells.
        before = len(self._met)
        for item in items:
            if type(item) not in SCALARS:
                self.replace(item)
        if len(self._met) != before:
            raise NotPlain


class Filling:
    """One decoding: replaces marks by slots, in the order in which encoding met them."""

    __slots__ = ("_following", "_seen")

    def __init__(self, following: Iterator[Any]) -> None:
        self._following = following
        self._seen: dict[int, Any] = {}

    def fill(self, data: Any) -> Any:
        """Return a container with its slots; lists and dicts are changed in place."""
        kind = type(data)
        if kind is tuple:
            if id(data) in self._seen:
                return self._seen[id(data)][1]
            made = tuple([item if type(item) in SCALARS else self._value(item) for item in data])
            # the data itself as well: its id must not be another's
            self._seen[id(data)] = data, made
            return made
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

    def _value(self, item: Any) -> Any:
        return next(self._following) if item is MARK else self.fill(item)
