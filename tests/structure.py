"""Counts of the package's structure: lines, modules, floors, methods over bases, private reach-ins.

    python -m tests.structure              # a table
    python -m tests.structure --reach-ins  # each access to a private name of another object

A part's *rooms* are its files and its folders; its *floors* are the longest chain of imports among
them, without those for annotations alone. A class's *methods* are those that its instances have
from classes of mpidist: its own and all inherited ones, each name once. Its *parts* are the objects
of classes of mpidist that it makes and keeps in an attribute, and theirs; a class that moved its
methods into a part shows them there. A *reach-in* is ``x._name`` where ``x`` is not ``self`` or
``cls`` or a class of the same module (a table of its methods), ``_name`` is an attribute or method
of a class of mpidist and of none of torch's tensors and modules, and the access is not inside a
class that has it itself.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.test_imports import ROOT, Module, imports_of, is_own, read_modules, target_of


@dataclass
class Class:
    """One class of the package; bases and parts are full names, of classes of ours alone."""

    name: str
    node: ast.ClassDef
    bases: list[str] = field(default_factory=list)
    parts: set[str] = field(default_factory=set)

    @property
    def methods(self) -> set[str]:
        return {
            item.name
            for item in self.node.body
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
        }

    @property
    def private_names(self) -> set[str]:
        """Return private methods, class attributes, and attributes set on ``self``."""
        names = set(self.methods)
        for item in ast.walk(self.node):
            match item:
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    names.add(name)
                case (
                    ast.AnnAssign(target=ast.Name(id=name))
                    | ast.Assign(targets=[ast.Name(id=name)])
                ):
                    names.add(name)
        return {name for name in names if is_private(name)}


@dataclass(frozen=True)
class ReachIn:
    """One access to another object's private name."""

    module: str
    line: int
    text: str


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def rooms(modules: Mapping[str, Module], part: str) -> dict[str, set[str]]:
    """Return the rooms of a part, and for each the rooms that it imports."""
    inside = {name: m for name, m in modules.items() if name.startswith(f"mpidist.{part}.")}
    found: dict[str, set[str]] = {}
    for name, module in inside.items():
        room = name.split(".")[2]
        imported = found.setdefault(room, set())
        annotations = _lines_for_annotations(module)
        for item in imports_of(module):
            if item.line in annotations:
                continue
            target = target_of(item, dict(modules)) if is_own(item.module) else ""
            if target in inside and target.split(".")[2] != room:
                imported.add(target.split(".")[2])
    return found


def _lines_for_annotations(module: Module) -> set[int]:
    """Return the lines within ``if TYPE_CHECKING``, which no program executes."""
    return {
        line
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inside in node.body
        for line in range(inside.lineno, (inside.end_lineno or inside.lineno) + 1)
    }


def floors(graph: Mapping[str, set[str]]) -> int:
    """Return the number of nodes on the longest path of a graph without cycles."""
    height: dict[str, int] = {}

    def visit(node: str) -> int:
        if node not in height:
            height[node] = 0  # a cycle of folders ends here
            height[node] = 1 + max((visit(below) for below in graph[node]), default=0)
        return height[node]

    return max((visit(node) for node in graph), default=0)


def classes_of(modules: Mapping[str, Module]) -> dict[str, Class]:
    """Return the classes at the top of modules, by full name, with their bases and parts."""
    found = {
        f"{module.name}.{node.name}": Class(f"{module.name}.{node.name}", node)
        for module in modules.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }
    for module in modules.values():
        names = {
            (alias.asname or alias.name): f"{item.module}.{alias.name}"
            for item in ast.walk(module.tree)
            if isinstance(item, ast.ImportFrom) and item.module
            for alias in item.names
        }

        def resolve(node: ast.expr, names: dict[str, str] = names, own: str = module.name) -> str:
            match node:
                case ast.Subscript(value=value):
                    return resolve(value)
                case ast.Name(id=name):
                    local = f"{own}.{name}"
                    return local if local in found else names.get(name, "")
                case ast.Attribute(value=ast.Name(id=name), attr=attr):
                    return f"{names.get(name, '')}.{attr}"
            return ""

        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            entry = found[f"{module.name}.{node.name}"]
            entry.bases = [base for base in map(resolve, node.bases) if base in found]
            for item in ast.walk(node):
                match item:
                    case (
                        ast.Assign(
                            targets=[ast.Attribute(value=ast.Name(id="self"))],
                            value=ast.Call(func=made),
                        )
                        | ast.AnnAssign(
                            target=ast.Attribute(value=ast.Name(id="self")),
                            value=ast.Call(func=made),
                        )
                    ) if (part := resolve(made)) in found:
                        entry.parts.add(part)
    return found


def lineage(classes: Mapping[str, Class], name: str) -> list[Class]:
    """Return a class and all its bases of ours, each once."""
    found: dict[str, Class] = {}

    def visit(current: str) -> None:
        if current not in found:
            found[current] = classes[current]
            for base in classes[current].bases:
                visit(base)

    visit(name)
    return list(found.values())


def methods_of(classes: Mapping[str, Class], name: str) -> set[str]:
    """Return the names of the methods that instances have from classes of ours."""
    return set().union(*(entry.methods for entry in lineage(classes, name)))


def parts_of(classes: Mapping[str, Class], name: str) -> set[str]:
    """Return the classes of the objects that instances keep, and of what these keep."""
    found: set[str] = set()
    todo = [name]
    while todo:
        for entry in lineage(classes, todo.pop()):
            new = entry.parts - found
            found |= new
            todo += new
    return found - {name}


def halves(classes: Mapping[str, Class], modules: Mapping[str, Module]) -> list[str]:
    """Return base classes with one subclass, in another module, that nobody constructs."""
    subclasses: dict[str, list[str]] = {}
    for entry in classes.values():
        for base in entry.bases:
            subclasses.setdefault(base, []).append(entry.name)
    called = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))
    }
    return sorted(
        base
        for base, below in subclasses.items()
        if len(below) == 1
        and below[0].rpartition(".")[0] != base.rpartition(".")[0]
        and base.rpartition(".")[2] not in called
        and not is_protocol(classes[base])
    )


def is_protocol(entry: Class) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id in ("Protocol", "ABC", "NamedTuple")
        for base in entry.node.bases
        for node in ast.walk(base)
    )


def reach_ins(classes: Mapping[str, Class], modules: Mapping[str, Module]) -> Iterator[ReachIn]:
    """Yield each access to a private name of another object."""
    ours = set().union(*(entry.private_names for entry in classes.values()))
    ours -= {*dir(torch.Tensor), *dir(torch.nn.Module()), *dir(torch.distributed.ProcessGroup)}

    def visit(node: ast.AST, module: Module, own: set[str]) -> Iterator[ReachIn]:
        if isinstance(node, ast.ClassDef):
            entry = classes.get(f"{module.name}.{node.name}")
            if entry is not None:
                own = set().union(
                    *(c.private_names for c in lineage(classes, entry.name)),
                )
        match node:
            case ast.Attribute(value=value, attr=name) if (
                is_private(name)
                and name in ours
                and name not in own
                and not (
                    isinstance(value, ast.Name)
                    and (value.id in ("self", "cls") or f"{module.name}.{value.id}" in classes)
                )
                and not ast.unparse(value).startswith(("torch.", "super()"))
            ):
                yield ReachIn(module.name, node.lineno, ast.unparse(node))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, module, own)

    for module in modules.values():
        yield from visit(module.tree, module, set())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reach-ins", action="store_true", help="list them, and print no table")
    parser.add_argument("--root", type=Path, default=ROOT, help="a tree with a folder mpidist")
    args = parser.parse_args(words)
    modules = read_modules(args.root)
    classes = classes_of(modules)
    reached = list(reach_ins(classes, modules))
    if args.reach_ins:
        for entry in reached:
            print(f"{entry.module}:{entry.line}: {entry.text}")
        return
    lines = {name: len(m.path.read_text().splitlines()) for name, m in modules.items()}
    print(f"{len(modules)} modules, {sum(lines.values())} lines, {len(classes)} classes")
    print(f"{len(reached)} reach-ins to private names")
    print("\nfloors (rooms):")
    parts = sorted({m.part for m in modules.values() if (args.root / "mpidist" / m.part).is_dir()})
    for part in parts:
        graph = rooms(modules, part)
        own = [lines[name] for name, m in modules.items() if m.part == part]
        print(f"  {part:12} {floors(graph):3} ({len(graph)}), {len(own)} modules, {sum(own)} lines")
    print("\nmethods over all bases, beyond 40 (with those of all parts held):")
    for name in sorted(classes, key=lambda name: -len(methods_of(classes, name))):
        own_methods = methods_of(classes, name)
        if len(own_methods) > 40:
            held = parts_of(classes, name)
            total = len(own_methods) + sum(len(methods_of(classes, part)) for part in held)
            print(f"  {name}: {len(own_methods)} ({total} with {len(held)} parts)")
    print("\nbases with one subclass, elsewhere, that nobody constructs:")
    for name in halves(classes, modules):
        print(f"  {name}")


if __name__ == "__main__":
    main()
