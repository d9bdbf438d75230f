"""Chains of references that keep an object alive."""

from __future__ import annotations

import gc
import sys
import threading
import types
from typing import Any

_LONGEST = 30  # objects of a chain


def chain(class_name: str) -> str:
    """Return what holds an object of a class (module and name), from a root to it.

    Frozen objects are no longer frozen afterwards: the garbage collector finds no holders there.
    """
    gc.unfreeze()
    gc.collect()
    for one in gc.get_objects():
        kind = type(one)
        if f"{kind.__module__}.{kind.__qualname__}" == class_name:
            return " > ".join(map(_named, reversed(_path(one))))
    return "it is gone"


def _path(wanted: object) -> list[object]:
    """Return an object and its holders up to a module's names or a variable of a running function.

    Without such a root the chain is the longest that was found: C holds its end.
    """
    running = _running()
    # Breadth first: the shortest chain says most. By an object's id: what it is, what it holds.
    found: dict[int, tuple[object, int]] = {id(wanted): (wanted, 0)}
    level = [wanted]
    last = wanted
    own = {id(found), id(running)}
    for _ in range(_LONGEST):
        following: list[object] = []
        own |= {id(level), id(following)}
        for one in level:
            last = one
            if id(one) in running:
                return [*_back(found, one), running[id(one)]]
            if isinstance(one, dict) and "__spec__" in one:
                return _back(found, one)
            for holder in gc.get_referrers(one):
                if id(holder) not in found and id(holder) not in own and not _is_of_search(holder):
                    found[id(holder)] = entry = holder, id(one)
                    own.add(id(entry))
                    following.append(holder)
        if not following:
            break
        level = following
    return _back(found, last)


def _running() -> dict[int, str]:
    """Return the functions that run, in words, by the ids of their variables' values.

    The garbage collector does not know what a running function holds.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for ident, top in sys._current_frames().items():
        frame: types.FrameType | None = top
        while frame is not None:
            if frame.f_code.co_filename != __file__:
                where = f"{names.get(ident, ident)} in {frame.f_code.co_name}"
                found.update(dict.fromkeys(map(id, frame.f_locals.values()), where))
            frame = frame.f_back
    return found


def _back(found: dict[int, tuple[object, int]], last: object) -> list[object]:
    path, key = [last], found[id(last)][1]
    while key:
        one, key = found[key]
        path.append(one)
    return path[::-1]


def _is_of_search(holder: object) -> bool:
    return isinstance(holder, types.FrameType) and holder.f_code.co_filename == __file__


def _named(one: Any) -> str:
    if isinstance(one, str):
        return f"thread {one}"
    if isinstance(one, types.FrameType):
        return f"frame {one.f_code.co_qualname}" if hasattr(one.f_code, "co_qualname") else str(one)
    if isinstance(one, dict) and "__spec__" in one:
        return f"module {one.get('__name__')}"
    if isinstance(one, types.FunctionType):
        return f"function {one.__qualname__}"
    kind = type(one)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
