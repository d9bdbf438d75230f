"""Public names of mpidist with the names of their parameters, one a line.

python -m tests.public_names > tests/public_names.txt
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from tests.tools.support import ROOT

FILE = ROOT / "tests" / "public_names.txt"
MODULES = (
    "mpidist.autograd",
    "mpidist.checkpoint",
    "mpidist.comm",
    "mpidist.ddp",
    "mpidist.ddp.hooks",
    "mpidist.ddp.hooks.checkpoint",
    "mpidist.elastic",
    "mpidist.errors",
    "mpidist.nn",
    "mpidist.optim",
    "mpidist.optim.functional",
    "mpidist.rpc",
    "mpidist.rpc.functions",
    "mpidist.slurm",
    "mpidist.trace",
)
# Their frameworks may be missing, so that they are read and not imported.
READ = ("mpidist.frameworks.fabric", "mpidist.frameworks.lightning")
_MARKS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def lines() -> list[str]:
    """Return a line for each public name: of functions and methods with their parameters."""
    found = [line for module in MODULES for line in _of_module(module)]
    found += [f"{module}.{name}" for module in READ for name in _read(module)]
    return sorted(found)


def _of_module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    for own in getattr(module, "__all__", None) or _defined(module):
        yield from _of_value(f"{name}.{own}", getattr(module, own))


def _defined(module: Any) -> list[str]:
    """Return the public classes and functions that a module without ``__all__`` defines."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]


def _of_value(path: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield path + (_parameters(value) if inspect.isroutine(value) else "")
        return
    is_ours = value.__module__.startswith("mpidist")
    yield path + (_parameters(value) if is_ours else "")
    if not is_ours:
        return
    if issubclass(value, enum.Enum):
        yield from (f"{path}.{member}" for member in value.__members__)
        return
    for name, inner in _members(value):
        yield f"{path}.{name}" + (_parameters(inner, bound=True) if callable(inner) else "")


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that classes of mpidist define."""
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("mpidist"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen or inspect.isclass(value):
                continue
            seen.add(name)
            if isinstance(value, (staticmethod, classmethod)):
                yield name, value.__get__(None, cls)
            elif callable(value) or isinstance(value, property):
                yield name, value


def _parameters(function: Callable[..., Any], bound: bool = False) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a class whose constructor is C's
        return ""
    texts, is_keyword = [], False
    for parameter in parameters:
        if bound and parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword and "*" not in texts:
            texts.append("*")
        is_keyword = is_keyword or parameter.kind is parameter.VAR_POSITIONAL
        texts.append(_MARKS.get(parameter.kind, "") + parameter.name)
    return f"({', '.join(texts)})"


def _read(module: str) -> list[str]:
    """Return ``__all__`` of a module that is not imported."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )


if __name__ == "__main__":
    print("\n".join(lines()))
