"""Mutants of the functions that most modules use: which of them no test notices.

    python -m tests.mutations --count 100 --seed 0       # minutes; prints survivors, and a summary
    python -m tests.mutations --only comm/consistency    # functions of one module

One change is made to one function (a comparison turned, a constant moved by one, an operator or a
condition exchanged, a statement left out), in a copy of the tree. Then run the test files that name
the module: those of one process and, if none fails, those of two ranks. A mutant that no test
notices is printed with its difference. A survivor is a missing test, or a change without effect.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.test_imports import ROOT, Module, imports_of, is_own, read_modules, target_of

_LIMIT_S = 240
_MARKS = "not gpu and not timing and not long and not slurm and not slow"
_FILES = 4  # test files for each module, at most

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A function at the top of a module, and the number of modules that use it."""

    module: str
    name: str
    users: int


def used_functions(modules: Mapping[str, Module]) -> list[Function]:
    """Return the functions that other modules use, the most used first."""
    users: Counter[tuple[str, str]] = Counter()
    for module in modules.values():
        found: set[tuple[str, str]] = set()
        aliases: dict[str, str] = {}
        for item in imports_of(module):
            if not is_own(item.module):
                continue
            target = target_of(item, dict(modules))
            if target == item.module:
                found.add((target, item.name))
            else:
                aliases[item.name] = target
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in aliases:
                    found.add((aliases[name], attr))
        users.update(found)
    functions = [
        Function(module, name, count)
        for (module, name), count in users.items()
        if module in modules
        and any(
            isinstance(node, ast.FunctionDef) and node.name == name
            for node in modules[module].tree.body
        )
    ]
    return sorted(functions, key=lambda f: (-f.users, f.module, f.name))


def mutants(function: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
    """Yield copies of a function with one change each."""
    places = sum(1 for _ in _changes(copy.deepcopy(function)))
    for number in range(places):
        changed = copy.deepcopy(function)
        for place, change in enumerate(_changes(changed)):
            if place == number:
                change()
                break
        yield ast.fix_missing_locations(changed)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it but annotations, which nothing executes."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _changes(function: ast.FunctionDef) -> Iterator[object]:
    """Yield a function for each change; it makes the change in place."""
    for node in _code(function):
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
                yield lambda n=node, o=operator: n.ops.__setitem__(0, _COMPARISONS[type(o)]())
            case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
                yield lambda n=node, o=operator: setattr(n, "op", _OPERATORS[type(o)]())
            case ast.BoolOp(op=operator):
                other = ast.Or if isinstance(operator, ast.And) else ast.And
                yield lambda n=node, o=other: setattr(n, "op", o())
            case ast.Constant(value=bool(value)):
                yield lambda n=node, v=value: setattr(n, "value", not v)
            case ast.Constant(value=int(value)):
                yield lambda n=node, v=value: setattr(n, "value", v + 1)
            case ast.If(test=test) | ast.IfExp(test=test):
                inverse = ast.UnaryOp(ast.Not(), test)
                yield lambda n=node, t=inverse: setattr(n, "test", t)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(body, list):
                continue
            for index, item in enumerate(body):
                is_call = isinstance(item, ast.Expr) and isinstance(item.value, ast.Call)
                if is_call or isinstance(item, (ast.AugAssign, ast.Raise)):
                    yield lambda b=body, i=index: b.__setitem__(i, ast.Pass())


def files_of(module: str, root: Path) -> list[Path]:
    """Return the test files that import a module, its own first, then the shortest."""
    stem = module.rpartition(".")[2]
    package = module.rpartition(".")[0]
    texts = {path: path.read_text() for path in sorted((root / "tests").rglob("test_*.py"))}
    named = [
        path
        for path, text in texts.items()
        if module in text or f"from {package} import {stem}" in text or path.stem == f"test_{stem}"
    ]
    own = root / "tests" / Path(*module.split(".")[1:-1]) / f"test_{stem}.py"
    named.sort(key=lambda path: (path != own, len(texts[path])))
    return named[:_FILES]


def is_noticed(tree: Path, files: list[Path]) -> bool:
    """Return whether one of the test files fails in a tree."""
    names = [str(path.relative_to(tree)) for path in files]
    variables = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    one = [sys.executable, *pytest, "-m", f"not mpi and {_MARKS}", *names]
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-n", "2"]
    two = [
        *mpirun, sys.executable, "-m", "mpi4py", *pytest, "-o", "faulthandler_timeout=60",
        "--only-mpi", "-m", f"mpi and {_MARKS}", *names,
    ]  # fmt: skip
    for command in (one, two):
        try:
            done = subprocess.run(
                command, cwd=tree, env=variables, capture_output=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (0, 5):  # 5: no test was selected
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="functions, the most used first")
    parser.add_argument("--seed", type=int, default=0, help="chooses one change of each function")
    parser.add_argument("--only", default="", help="part of the module's path")
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "site", "dist", "*-results")
        shutil.copytree(ROOT, tree, ignore=ignored)
        modules = read_modules(tree)
        functions = [
            function
            for function in used_functions(modules)
            if options.only in function.module.replace(".", "/")
        ]
        tried = 0
        for function in functions:
            if tried == options.count:
                break
            module = modules[function.module]
            source = module.path.read_text()
            (node,) = (
                n
                for n in module.tree.body
                if isinstance(n, ast.FunctionDef) and n.name == function.name
            )
            found = list(mutants(node))
            files = files_of(function.module, tree)
            if not found or not files:
                continue
            tried += 1
            changed = chosen.choice(found)
            lines = source.splitlines(keepends=True)
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            lines[start : node.end_lineno] = [ast.unparse(changed) + "\n"]
            module.path.write_text("".join(lines))
            noticed = is_noticed(tree, files)
            module.path.write_text(source)
            state = "noticed" if noticed else "SURVIVES"
            print(f"{tried:3} {state:8} {function.module}.{function.name}", flush=True)
            if not noticed:
                survivors += 1
                before, after = ast.unparse(node).splitlines(), ast.unparse(changed).splitlines()
                difference = difflib.unified_diff(before, after, lineterm="", n=1)
                print("\n".join(list(difference)[2:]), flush=True)
    print(f"{tried} mutants, {tried - survivors} noticed, {survivors} survive")


if __name__ == "__main__":
    main()
