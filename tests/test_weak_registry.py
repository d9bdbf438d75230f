"""Registries by weak references: listed by one thread while others add."""

import gc
import re
import sys
import threading
from pathlib import Path
from weakref import WeakSet

import pytest

import mpidist
from mpidist.weak_registry import WeakRegistry

PACKAGE = Path(mpidist.__file__).parent
LISTS = 20_000


class Entry:
    """An object that is compared by identity."""


@pytest.fixture
def short_turns():
    """Threads that take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def listed_while_added(registry, entries):
    """Call ``entries()`` until it fails or has been called often; return the error.

    Another thread adds entries, and drops old ones, meanwhile.
    """
    is_over, began = threading.Event(), threading.Event()

    def add():
        kept = []
        while not is_over.is_set():
            for _ in range(50):
                kept.append(Entry())
                registry.add(kept[-1])
            began.set()
            del kept[:25]
            if len(kept) > 200:
                kept.clear()

    adding = threading.Thread(target=add)
    adding.start()
    try:
        assert began.wait(60)
        for _ in range(LISTS):
            entries()
    except RuntimeError as error:
        return error
    finally:
        is_over.set()
        adding.join()
    return None


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="newer sets may be listed")
def test_a_weak_set_cannot_be_listed_while_another_thread_adds(short_turns):
    entries = WeakSet()
    assert "changed size" in str(listed_while_added(entries, lambda: list(entries)))


def test_a_registry_is_listed_while_another_thread_adds(short_turns):
    registry = WeakRegistry()
    assert listed_while_added(registry, registry.alive) is None


def test_entries_have_their_order_and_go_when_nobody_holds_them():
    registry, entries = WeakRegistry(), [Entry() for _ in range(5)]
    for entry in [*entries, entries[0]]:
        registry.add(entry)
    assert registry.alive() == entries
    del entries[1:3], entry
    gc.collect()
    assert registry.alive() == entries and len(entries) == 3
    for _ in range(2):
        registry.discard(entries[1])
    assert registry.alive() == [entries[0], entries[2]]


def test_the_package_lists_no_weak_set():
    found = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"WeakSet\b(?!``)", path.read_text(encoding="utf-8"))
    ]
    assert not found, "threads add to what another one lists: mpidist.weak_registry"
