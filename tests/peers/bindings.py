"""Bindings of a suite's names to other objects, in each of its processes.

``PEERS_BINDINGS`` lists them: ``module:name=module:name``, separated by commas. The second object
takes the place of the first name.
"""

from __future__ import annotations

import importlib

BINDINGS = "PEERS_BINDINGS"


def bindings(text: str) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Return pairs of (module, name): that of a suite, and the one that takes its place."""
    pairs = [pair.split("=") for pair in text.split(",") if pair]
    split = lambda words: tuple(words.split(":"))  # noqa: E731
    return [(split(theirs), split(ours)) for theirs, ours in pairs]


def bind(text: str) -> None:
    """Bind what a list names."""
    for (module, name), (our_module, our_name) in bindings(text):
        ours = getattr(importlib.import_module(our_module), our_name)
        setattr(importlib.import_module(module), name, ours)
