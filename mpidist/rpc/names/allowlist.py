"""Allowlist of one worker: what others may call here (``init_rpc(..., allowed=[...])``).

The list is an index from names to objects, built once. A name in a message is looked up in the
index as it is, or refused. No message causes an import, a split of its name, or a look-up in a
module. An object that is replaced in its module later stays in the index as it was found.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from mpidist import errors
from mpidist.comm.mpi import trust
from mpidist.errors import MpidistError
from mpidist.rpc.names import allowlist_entries, callee, class_attributes, records

_MAX_PRINTED = 200  # characters of a name in an error
_NOT_LISTED = "it is not in the list of what this worker allows (init_rpc(..., allowed=[...]))"


class Refused(MpidistError):
    """A message names an object that this worker does not allow."""


# Exceptions that every worker admits: Python's own and this library's.
_EXCEPTIONS = MappingProxyType(
    {
        class_attributes.name_of(found, ":"): found
        for found in (*vars(builtins).values(), *vars(errors).values(), Refused)
        if isinstance(found, type) and issubclass(found, Exception)
    }
)


class Allowed:
    """Immutable index of the objects that messages to one worker may name.

    A listed class admits its constructor, the static and class methods that it defines, instances
    by fields if it is a dataclass or a class of named tuples (``records``: no constructor runs for
    these), instances by text and arguments if it is an ``Exception``, and calls of the public
    methods that it defines on instances that exist here. It does not admit attributes that it
    inherits from a class outside the list.

    Args:
        names: Functions, classes, modules, operators of torch and script functions, or names of
            these: ``"package.module.function"``, ``"package.module.Class"``,
            ``"package.module.Class.method"``; ``"package.module"`` or ``"package.module.*"`` for
            the public functions that this module itself defines (not what it imports, not
            classes); ``"torch.add"``, ``"aten::mul"``, ``"aten::mul.Tensor"``; ``"torch"`` or
            ``"torch.*"`` for torch's builtin functions of tensors, ``"aten"`` or ``"aten::*"`` for
            the public operators of a namespace. Both leave out ``from_file``.

    Raises:
        TypeError: Not a list, or an item of another kind.
        ValueError: A name that does not exist here, or an internal of mpidist (two entries admit
            its services: ``"mpidist.optim.local"`` and ``"mpidist.nn.remote.execute"``).
    """

    __slots__ = (
        "_classes",
        "_entries",
        "_functions",
        "_methods",
        "_named_classes",
        "_owners",
        "_single",
    )

    # Classes are compared by id, because a metaclass may redefine equality. The list keeps its
    # classes alive, so that no id is used twice.
    _classes: MappingProxyType[int, type]
    _entries: tuple[str, ...]
    _functions: MappingProxyType[bytes, tuple[int, Any]]
    _methods: MappingProxyType[int, MappingProxyType[str, object]]
    _named_classes: MappingProxyType[str, type]
    _owners: MappingProxyType[int, type]  # classes of single methods, by id
    _single: frozenset[tuple[int, str]]  # single methods: class id, name

    def __init__(self, names: Sequence[object]) -> None:
        if isinstance(names, str) or not isinstance(names, (list, tuple, set, frozenset)):
            raise TypeError(
                f"allowed is a list of names, functions, classes or modules; got {names!r}"
            )
        entries = [entry for item in names for entry in allowlist_entries.entries_of(item)]
        named = {entry.name: entry.target for entry in entries if isinstance(entry.target, type)}
        single = [
            (entry.owner, entry.name.rpartition(".")[2])
            for entry in entries
            if entry.owner is not None
        ]
        self._set(
            _classes=MappingProxyType({id(cls): cls for cls in named.values()}),
            _entries=tuple(sorted({allowlist_entries.display_name(item) for item in names})),
            _functions=MappingProxyType(
                {entry.name.encode(): (entry.kind, entry.target) for entry in entries}
            ),
            _named_classes=MappingProxyType(named),
            _owners=MappingProxyType({id(cls): cls for cls, _ in single}),
            _single=frozenset((id(cls), name) for cls, name in single),
        )
        tables = {
            key: MappingProxyType(allowlist_entries.methods_of(cls, self._lists_method))
            for key, cls in {**self._owners, **self._classes}.items()
        }
        self._set(_methods=MappingProxyType(tables))

    def function(self, kind: int, name: bytes) -> callee.Function:
        """Return a listed function, class or operator.

        Args:
            kind: ``CALL_PYTHON``, ``CALL_BUILTIN`` or ``CALL_SCRIPT``.
            name: From ``message.unpack_name``: ``module:qualified name``, or an operator's name.

        Raises:
            Refused: The function is not in the list.
        """
        found = self._functions.get(name)
        if found is None or found[0] != kind:
            text = printable_name(name.decode(errors="replace"))
            raise Refused(f'"{text}" may not be called: {_NOT_LISTED}')
        # A listed namespace has thousands of operators: each is resolved at its first use.
        return found[1] if found[1] is not None else callee.builtin(name.decode())

    def value(self, name: str) -> object:
        """Return a listed function, class or operator that is named in a message's data.

        Args:
            name: As for ``function``, as text.

        Raises:
            Refused: The object is not in the list.
        """
        found = self._functions.get(name.encode(errors="replace")) if type(name) is str else None
        if found is None:
            raise Refused(f'"{printable_name(name)}" may not be named: {_NOT_LISTED}')
        return found[1] if found[1] is not None else callee.builtin(name)

    def method(self, value: object, name: str) -> callee.Function:
        """Return a method of a value, bound to it.

        The value's own class and the class that defines the method must be listed. No code of the
        value runs: no ``__getattr__``, no property, no ``__class__``.

        Raises:
            Refused: The class is not listed; the name is not a method, not public, or inherited
                from a class outside the list.
        """
        cls = type(value)
        if type(name) is not str:
            raise Refused(
                f"a method is named by a str, not by a {class_attributes.name_of(type(name))}"
            )
        methods = self._methods.get(id(cls))
        if methods is None:
            raise Refused(
                f'methods of "{class_attributes.name_of(cls)}" may not be called: the class is not '
                "in the list"
            )
        try:
            attribute = methods[name]
        except KeyError:
            reason = (
                allowlist_entries.method_complaint(cls, name, self._lists_method)
                or "it was added to the class after init_rpc"
            )
            raise Refused(
                f'"{class_attributes.name_of(cls)}.{_printable(name)}" may not be called: {reason}'
            ) from None
        return allowlist_entries.bound(attribute, value, cls)

    def has_method(self, value: object, name: str) -> bool:
        """Return whether ``method`` would return a method."""
        return type(name) is str and name in self._methods.get(id(type(value)), ())

    def record(self, name: str) -> type:
        """Return a listed dataclass or named-tuple class, whose instances messages send by fields.

        Args:
            name: ``module:qualified name``.

        Raises:
            Refused: The class is not in the list, or is not a record class (``records``).
        """
        found = self._named_classes.get(name) if type(name) is str else None
        if found is None:
            raise Refused(f'instances of "{printable_name(name)}" may not be made: {_NOT_LISTED}')
        if not records.is_record(found):
            raise Refused(
                f'instances of "{class_attributes.name_of(found)}" may not be made: it '
                f"{records.obstacle(found)}"
            )
        return found

    def exception(self, name: str) -> type[Exception] | None:
        """Return an exception class of Python, ``mpidist.errors`` or the list; None for others.

        Args:
            name: ``module:qualified name``.
        """
        if type(name) is not str:
            return None
        found = _EXCEPTIONS.get(name) or self._named_classes.get(name)
        return found if found is not None and class_attributes.is_below(found, Exception) else None

    def has_class(self, cls: object) -> bool:
        """Return whether the list has this class itself."""
        return id(cls) in self._classes

    def entries(self) -> tuple[str, ...]:
        """Return the items of the list as text, sorted."""
        return self._entries

    def __repr__(self) -> str:
        return f"Allowed({list(self._entries)!r})"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"the list of what a worker allows does not change: {name!r} cannot be set"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"the list of what a worker allows does not change: {name!r} cannot be deleted"
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _lists_method(self, cls: type, name: str) -> bool:
        return id(cls) in self._classes or (id(cls), name) in self._single


def make_allowlist(allowed: Sequence[object] | None) -> Allowed | None:
    """Make the list of ``init_rpc``; None for anything.

    Raises:
        MpidistError: None with ``MPIDIST_TRUST=data``.
    """
    if allowed is None and trust.is_data_only():
        raise MpidistError(
            f"{trust.ENV_TRUST}=data: init_rpc needs a list, allowed=[...]; without one others may "
            "call anything"
        )
    return Allowed(allowed) if allowed is not None else None


def printable_name(name: object) -> str:
    """Return a name from a message, safe for a log."""
    if type(name) is not str:
        return f"an object of {class_attributes.name_of(type(name))}"
    return _printable(name if "::" in name else name.replace(":", ".", 1))


def _printable(text: str) -> str:
    """Return text from a message, safe for a log: one printable line of limited length."""
    text = text if len(text) <= _MAX_PRINTED else f"{text[:_MAX_PRINTED]}..."
    return text if text.isprintable() else ascii(text)[1:-1]
