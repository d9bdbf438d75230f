"""docs/torch-versions.md: each private or replaced name of torch, on the installed torch."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from torch.distributed.algorithms.join import Joinable

from mpidist import torch_version
from tests.tools.support import ROOT

PAGE = ROOT / "docs" / "torch-versions.md"
PACKAGE = ROOT / "mpidist"
# Attributes with an underscore that are no names of torch.
OF_OTHERS = {
    "_getframe": "sys",
    "_exit": "os",
    "_fields": "named tuples",
    "_is_owned": "locks of threading",
    "_ddp_comm_hook": "Lightning's strategy",
    "_ddp_comm_state": "Lightning's strategy",
    "_ddp_comm_wrapper": "Lightning's strategy",
    "_ddp_kwargs": "Lightning's strategy",
    "_determine_ddp_device_ids": "Lightning's strategy",
}


class Row(NamedTuple):
    """A name, and whether the installed torch must have it."""

    name: str
    is_expected: bool


def rows() -> Iterator[Row]:
    text = PAGE.read_text(encoding="utf-8")
    installed = torch_version.numbers(torch.__version__)
    for name, versions in re.findall(r"^\| `(torch[\w.]+)` \| ([^|]+?) \|", text, re.MULTILINE):
        bounds = re.fullmatch(r"(>=|<=)(\d+\.\d+)", versions)
        if bounds:
            bound = torch_version.numbers(bounds[2])
            is_expected = installed >= bound if bounds[1] == ">=" else installed <= bound
        elif versions == "CUDA":
            is_expected = torch.version.cuda is not None
        else:
            assert versions == "all", f"{name}: versions {versions!r}"
            is_expected = True
        yield Row(name, is_expected)


ROWS = list(rows())


class Joined(Joinable):
    """A ``Joinable`` that joins nothing."""

    def __init__(self):
        super().__init__()

    def join_hook(self, **kwargs):
        raise NotImplementedError

    join_device = torch.device("cpu")
    join_process_group = None


@functools.cache
def instances() -> dict[type, object]:
    """Return an object of each class whose constructor sets a listed attribute."""
    return {
        torch.optim.Optimizer: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
        torch.nn.Module: torch.nn.Identity(),
        Joinable: Joined(),
    }


def attribute(owner: Any, name: str) -> Any:
    if not hasattr(owner, name) and isinstance(owner, type):
        owner = instances().get(owner, owner)
    return getattr(owner, name)


def exists(name: str) -> bool:
    parts = name.split(".")
    # Some modules have the name of a function beside them: torch.distributed.rendezvous.
    for count in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ImportError):
            start = importlib.import_module(".".join(parts[:count]))
            break
    try:
        functools.reduce(attribute, parts[count:], start)
    except AttributeError:
        return False
    return True


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class Module:
    """Names of torch that a module of mpidist writes."""

    def __init__(self, text: str) -> None:
        self._nodes = list(ast.walk(ast.parse(text)))
        self._torch: dict[str, str] = {}
        for node in self._nodes:
            self._see(node)

    def _see(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "torch":
                    self._torch[one.asname or "torch"] = one.name if one.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for one in node.names:
                self._torch[one.asname or one.name] = f"{node.module}.{one.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            call, given = node.value.func, node.value.args
            named = getattr(call, "attr", getattr(call, "id", ""))
            is_import = named == "import_module" and isinstance(given[0], ast.Constant)
            if is_import and given[0].value.startswith("torch") and isinstance(target, ast.Name):
                self._torch[target.id] = given[0].value

    def of_torch(self) -> Iterator[str]:
        """Yield dotted names that begin at torch and have a private part."""
        yield from (name for name in self._torch.values() if any(map(is_private, name.split("."))))
        for node in self._nodes:
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                first, *others = ast.unparse(node).split(".")
                if first in self._torch:
                    yield ".".join([self._torch[first], *others])

    def attributes(self) -> Iterator[str]:
        """Yield the private attributes of any object but ``sys``, whose own are documented."""
        for node in self._nodes:
            if (
                isinstance(node, ast.Attribute)
                and is_private(node.attr)
                and ast.unparse(node.value) != "sys"
            ):
                yield node.attr

    def own(self) -> Iterator[str]:
        """Yield what the module defines or assigns to ``self``."""
        for node in self._nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def modules() -> dict[str, Module]:
    return {
        str(path.relative_to(PACKAGE)): Module(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def unlisted(found: dict[str, Module], listed: list[str]) -> list[str]:
    """Return the private names in the sources that no listed name covers."""
    parts = {part for name in listed for part in name.split(".")}
    own = {name for module in found.values() for name in module.own()}
    known = own | parts | OF_OTHERS.keys()
    # Before a name that is part of one that is listed, and below one that is.
    missing = {
        f"{path}: {name}"
        for path, module in found.items()
        for name in module.of_torch()
        if not any(
            f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for one in listed
        )
    }
    missing |= {
        f"{path}: ._{name.removeprefix('_')}"
        for path, module in found.items()
        for name in module.attributes()
        if name not in known
    }
    return sorted(missing)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_listed_name_exists_in_its_versions(row):
    assert exists(row.name) == row.is_expected


@pytest.mark.slow
def test_every_private_name_in_the_sources_is_listed():
    assert len(ROWS) > 50
    assert not unlisted(modules(), [row.name for row in ROWS])


def test_every_listed_name_is_used():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", text))
    assert not [row.name for row in ROWS if row.name.split(".")[-1] not in words]


def test_a_new_private_name_is_found():
    new = Module(
        "import torch\nimport torch.distributed as dist\nfrom torch._x import y\n"
        "dist._new()\ndef f(t):\n    return t._of_tensor, torch._C._listed, self._mine\n"
        "class A:\n    def __init__(self):\n        self._mine = 1\n"
    )
    assert unlisted({"new": new}, ["torch._C._listed"]) == [
        "new: ._new",
        "new: ._of_tensor",
        "new: torch._x.y",
        "new: torch.distributed._new",
    ]
