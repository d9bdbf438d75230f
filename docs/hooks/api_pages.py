"""Packages as directives of mkdocstrings: public names by defining module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# The reference contains each name of a package's ``__all__``.
PACKAGES = (
    "mpidist.comm",
    "mpidist.ddp",
    "mpidist.ddp.hooks",
    "mpidist.rpc",
    "mpidist.autograd",
    "mpidist.optim",
    "mpidist.nn",
    "mpidist.checkpoint",
    "mpidist.elastic",
    "mpidist.trace",
    "mpidist.slurm",
    "mpidist.errors",
)


def public_names(module: ModuleType) -> list[str]:
    """Return ``__all__``, or the public classes and functions defined in the module."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    ]
    return [name for name in own if not name.startswith("_")]


def directives(name: str, chosen: Sequence[str] = ()) -> str:
    """Return the Markdown that documents names of a module.

    Args:
        name: The module.
        chosen: Names to document; all public ones if empty.

    Raises:
        ValueError: A chosen name is not public there.
    """
    module = importlib.import_module(name)
    public = public_names(module)
    if unknown := [one for one in chosen if one not in public]:
        raise ValueError(f"{name} has no public {', '.join(unknown)}")
    parts, constants = [], []
    for one in chosen or public:
        value = getattr(module, one)
        if inspect.isclass(value) or inspect.isfunction(value):
            parts.append(_directive(name, one, value))
        else:
            constants.append(f'| <span id="{name}.{one}"></span>`{one}` | {_shown(value)} |')
    if constants:
        parts.append("\n".join(["## Values", "", "| name | value |", "| --- | --- |", *constants]))
    return "\n\n".join(parts)


def _directive(package: str, name: str, value: Any) -> str:
    if value.__qualname__ != name:
        return f"[](){{#{package}.{name}}}\n## {name}\n\nAnother name of `{value.__qualname__}`."
    return "\n".join(
        [
            f"[](){{#{package}.{name}}}",
            f"::: {value.__module__}.{value.__qualname__}",
            "    options:",
            f"      heading: {name}",
            f"      toc_label: {name}",
        ]
    )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"`{getattr(key, '__name__', key)}`" for key in value)
    return f"`{value!r}`"
