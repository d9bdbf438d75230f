"""Imports of the package: directions, origins, and names of modules."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The parts of mpidist, lowest first. A part imports lower ones only, and never another of its own
# row.
LAYERS = [
    [
        "errors",
        "cache",
        "dynamo",
        "exception_copy",
        "file_errors",
        "folder_sync",
        "gc_pause",
        "state_names",
        "torch_version",
        "weak_registry",
    ],
    [
        "future",
        "progress_bar",
        "saved_file",
        "shared_place",
        "shipped",
        "state_scalars",
        "torch_futures",
        "whole_file",
    ],
    ["kernels"],
    ["comm"],
    ["c10d", "ddp", "reports", "rpc", "zero"],
    ["autograd"],
    ["optim"],
    ["nn", "checkpoint", "elastic", "frameworks", "slurm", "trace", "tune"],
    ["cli"],
    ["__main__"],
    ["mpidist"],  # the package's own __init__: its public face
]
LEVEL = {part: level for level, row in enumerate(LAYERS) for part in row}

# The storeys of a part, lowest first: its folders, single files by name, and "" for its other
# files. A storey imports itself and lower ones.
STOREYS = {
    "comm": [
        ["mpi"],
        ["memory", "recorder"],
        ["discovery", "serialization"],
        ["algorithms"],
        ["execution"],
        ["messages"],
        ["watchdog"],
        ["store"],
        ["coupling"],
        [""],
        ["transport"],
    ],
    "zero": [["shards"], ["state"], ["step"], [""]],
    "rpc": [
        ["constants", "functions", "message", "rref_store", "worker"],
        ["names", "options", "threads"],
        ["values"],
        ["calls"],
        ["serving"],
        [""],
    ],
    "ddp": [["buckets"], ["hooks"], [""]],
}

# Libraries that only one part may import, and names that only one module may use.
OWNED_LIBRARIES = {"mpi4py": "comm", "cupy": "kernels", "cupyx": "kernels"}
OWNED_NAMES = {"COMM_WORLD": "mpidist.comm.mpi.runtime"}

# Names that a lower part may look up at run time: a module that registers there, loaded by the
# first message that needs it; a replacement of torch's class, loaded by its first use; the trace of
# a program that asks for one.
LOADED_LATE = {
    ("mpidist.comm.world_group", "mpidist.trace.timeline"),
    ("mpidist.rpc.threads.interceptor", "mpidist.autograd.api"),
    ("mpidist.c10d.ddp_name", "mpidist.ddp.module"),
}

# Names of modules for functions that belong together by accident only.
HOMELESS = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


@dataclass(frozen=True)
class Import:
    """One name that a module imports; `name` is empty for `import module`."""

    module: str
    name: str
    line: int


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def part(self) -> str:
        return part_of(self.name)

    @functools.cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(imports_of(self))

    @functools.cached_property
    def defined(self) -> set[str]:
        return names_bound(self.tree.body, by_import=False)

    @functools.cached_property
    def imported(self) -> set[str]:
        return names_bound(self.tree.body, by_import=True)


def part_of(module: str) -> str:
    """Return `comm` for `mpidist.comm.group`, `errors` for `mpidist.errors`; else `mpidist`."""
    return ([*module.split("."), module])[1]


def read_modules(root: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted((root / "mpidist").rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        name = ".".join(names[:-1] if names[-1] == "__init__" else names)
        text = path.read_text()
        modules[name] = Module(name, path, text, ast.parse(text, str(path)))
    return modules


def imports_of(module: Module) -> Iterator[Import]:
    """Yield every import of a module, also in functions and for type checking."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    for node in ast.walk(module.tree):
        match node:
            case ast.Import():
                yield from (Import(alias.name, "", node.lineno) for alias in node.names)
            case ast.ImportFrom():
                above = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                yield from (Import(source, alias.name, node.lineno) for alias in node.names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(source)), *_],
            ):
                yield Import(source, "", node.lineno)


def is_own(module: str) -> bool:
    return module.split(".")[0] == "mpidist"


def target_of(item: Import, modules: dict[str, Module]) -> str:
    """Return the imported module: mpidist.comm.group for `from mpidist.comm import group`."""
    submodule = f"{item.module}.{item.name}"
    return submodule if submodule in modules else item.module


def names_bound(statements: list[ast.stmt], *, by_import: bool) -> set[str]:
    """Return the names that top-level statements bind, by import or by definition."""
    names: set[str] = set()
    for node in statements:
        match node:
            case ast.Import() | ast.ImportFrom():
                if by_import:
                    names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names |= set() if by_import else {node.name}
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                blocks = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
                blocks += [handler.body for handler in getattr(node, "handlers", [])]
                for block in blocks:
                    names |= names_bound(block, by_import=by_import)
            case _ if not by_import:
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                names |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return names


def check_layer(module: Module, target: str) -> str | None:
    unknown = {module.part, part_of(target)} - LEVEL.keys()
    if unknown:
        return f"{unknown.pop()} has no layer: give it one in LAYERS"
    if module.part != part_of(target) and LEVEL[module.part] <= LEVEL[part_of(target)]:
        return f"imports {target}: {module.part} is not above {part_of(target)}"
    return None


def storey_of(module: Module | str) -> tuple[str, str]:
    """Return part and storey, "" for a module of the part itself without a storey of its own.

    `comm`, `mpi` for `mpidist.comm.mpi.library`; `comm`, "" for `mpidist.comm.group`; `rpc`,
    `message` for `mpidist.rpc.message`.
    """
    is_package, name = (
        (module.is_package, module.name) if isinstance(module, Module) else (False, module)
    )
    parts = name.split(".")[1:] + ([""] if is_package else [])
    named = {name for row in STOREYS.get(parts[0], []) for name in row}
    return parts[0], parts[1] if len(parts) > 2 or (parts[1:] and parts[1] in named) else ""


def check_storey(module: Module, target: Module) -> str | None:
    (part, own), (_, other) = storey_of(module), storey_of(target)
    if (
        part not in STOREYS
        or part != target.part
        or own == other
        or target.name == f"mpidist.{part}"
    ):
        return None
    height = {name: level for level, row in enumerate(STOREYS[part]) for name in row}
    for name in (own, other):
        if name not in height:
            return f"{part}/{name} has no storey: give it one in STOREYS"
    if height[own] <= height[other]:
        return f"imports {target.name}: {part}/{own} is not above {part}/{other}"
    return None


def check_origin(module: Module, item: Import, modules: dict[str, Module]) -> str | None:
    """Return the error if a name is not imported from the module that defines it, else None."""
    target = target_of(item, modules)
    if target not in modules:
        return f"imports {target}, which does not exist"
    if target != item.module:
        return None  # a submodule itself
    if modules[target].is_package:
        return (
            f"imports {item.name or 'the package'} from {target}: name the module that defines it"
        )
    if item.name == "*":
        return f"imports * from {target}: name what it needs"
    if not item.name or item.name in modules[target].defined:
        return None
    if item.name in modules[target].imported:
        return f"imports {item.name} from {target}, which only imports it itself"
    return f"imports {item.name} from {target}, which does not define it"


def check_owned(module: Module) -> Iterator[tuple[int, str]]:
    for item in module.imports:
        owner = OWNED_LIBRARIES.get(item.module.split(".")[0])
        if owner not in (None, module.part):
            yield item.line, f"imports {item.module}: only mpidist.{owner} may"
    if not any(name in module.text for name in OWNED_NAMES):
        return
    for node in ast.walk(module.tree):
        match node:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.alias(name=name)
                | ast.Constant(value=str(name))
            ):
                owner = OWNED_NAMES.get(name)
                if owner not in (None, module.name):
                    yield node.lineno, f"names {name}: only {owner} may"


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle of the graph, with the first node repeated at the end, or an empty list."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        for successor in sorted(graph[node]):
            if cycle := visit(successor, [*path, node]):
                return cycle
        finished.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), [])


def find_violations(root: Path) -> list[str]:
    """Yield one line for each violation of a rule in the tree under `root`."""
    modules = read_modules(root)
    graph: dict[str, set[str]] = {name: set() for name in modules}
    found: list[str] = []
    for module in modules.values():
        where = module.path.relative_to(root)
        if module.path.stem in HOMELESS:
            found.append(f"{where}: not a noun; name the module by what it holds")
        if module.part not in LEVEL:
            found.append(f"{where}: {module.part} has no layer: give it one in LAYERS")
            continue
        found += [f"{where}:{line}: {text}" for line, text in check_owned(module)]
        for item in filter(lambda item: is_own(item.module), module.imports):
            target = target_of(item, modules)
            if (module.name, target) in LOADED_LATE:
                continue
            complaints = [check_layer(module, target), check_origin(module, item, modules)]
            found += [f"{where}:{item.line}: {text}" for text in complaints if text]
            if target in modules:
                graph[module.name].add(target)
                if complaint := check_storey(module, modules[target]):
                    found.append(f"{where}:{item.line}: {complaint}")
    if cycle := find_cycle(graph):
        found.append("cycle: " + " -> ".join(cycle))
    if (root / "cuda" / "__init__.py").exists():
        found.append("cuda/__init__.py: it hides NVIDIA's own package `cuda`")
    return list(dict.fromkeys(found))


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


SOUND = {
    "mpidist/__init__.py": "from mpidist.errors import MpidistError\n",
    "mpidist/errors.py": "class MpidistError(RuntimeError): ...\n",
    "mpidist/future.py": "from mpidist.errors import MpidistError\nif True:\n    LIMIT: int = 3\n",
    "mpidist/kernels/__init__.py": "",
    "mpidist/kernels/load.py": "import cupy\n",
    "mpidist/comm/__init__.py": "from mpidist.comm.group import ProcessGroup\n",
    "mpidist/comm/mpi/__init__.py": "",
    "mpidist/comm/mpi/runtime.py": "def world():\n    from mpi4py import MPI\n    return "
    "MPI.COMM_WORLD\n",
    "mpidist/comm/algorithms/__init__.py": "",
    "mpidist/comm/algorithms/ring.py": "from mpidist.comm.mpi import runtime\n",
    "mpidist/comm/group.py": "from mpidist.comm.mpi import runtime\nclass ProcessGroup: ...\n",
    "mpidist/rpc/__init__.py": "",
    "mpidist/rpc/agent.py": (
        "import mpidist.comm.mpi.runtime\n"
        "from ..comm.group import ProcessGroup\n"
        "from mpidist.future import LIMIT\n"
        "try:\n    import yaml\nexcept ImportError:\n    yaml = None\n"
    ),
    "mpidist/ddp/__init__.py": "",
    "mpidist/ddp/module.py": "",
    "cuda/pack.cu": "",
}

WORK, API = "mpidist/comm/work.py", "mpidist/rpc/api.py"
BROKEN = {
    "up": (WORK, "from mpidist.rpc.agent import yaml", "comm is not above rpc"),
    "up, relative": (WORK, "from ..rpc import agent", "comm is not above rpc"),
    "up, in a function": (WORK, "def f():\n    import mpidist.ddp.module", "comm is not above ddp"),
    "up, by name": (
        WORK,
        "f = importlib.import_module('mpidist.ddp.module')",
        "comm is not above ddp",
    ),
    "sideways": ("mpidist/ddp/module.py", "from mpidist.rpc import agent", "ddp is not above rpc"),
    "in the lowest rows": (
        "mpidist/errors.py",
        "from mpidist.future import LIMIT",
        "not above future",
    ),
    "from the top": (
        API,
        "from mpidist import MpidistError",
        "imports MpidistError from mpidist: name",
    ),
    "the top": (API, "import mpidist", "imports the package from mpidist: name"),
    "from a package": (
        API,
        "from mpidist.comm import ProcessGroup",
        "name the module that defines it",
    ),
    "second hand": (API, "from mpidist.future import MpidistError", "which only imports it itself"),
    "undefined": (API, "from mpidist.future import Promise", "which does not define it"),
    "star": (API, "from mpidist.future import *", "name what it needs"),
    "missing module": (API, "import mpidist.comm.nowhere", "which does not exist"),
    "cycle": (
        "mpidist/comm/mpi/runtime.py",
        "def f():\n    from .. import group",
        "cycle: mpidist.comm.group",
    ),
    "up a storey": (
        "mpidist/comm/mpi/work.py",
        "import mpidist.comm.algorithms.ring",
        "comm/mpi is not above comm/algorithms",
    ),
    "up to a part's files": (
        "mpidist/comm/mpi/work.py",
        "import mpidist.comm.group",
        "comm/mpi is not above comm/",
    ),
    "up from a file with a storey": (
        "mpidist/rpc/message.py",
        "import mpidist.rpc.agent",
        "rpc/message is not above rpc/",
    ),
    "no storey": (
        "mpidist/comm/attic/work.py",
        "import mpidist.comm.group",
        "comm/attic has no storey",
    ),
    "mpi4py": (API, "def f():\n    from mpi4py import MPI", "only mpidist.comm may"),
    "cupy": (WORK, "import cupy.cuda", "only mpidist.kernels may"),
    "world": (WORK, "def f(MPI):\n    return MPI.COMM_WORLD", "names COMM_WORLD"),
    "world, imported": (WORK, "from mpi4py.MPI import COMM_WORLD as w", "names COMM_WORLD"),
    "world, by name": (WORK, "f = getattr(MPI, 'COMM_WORLD')", "names COMM_WORLD"),
    "homeless": ("mpidist/comm/utils.py", "", "not a noun"),
    "new part": ("mpidist/pipeline.py", "", "pipeline has no layer"),
    "cuda package": ("cuda/__init__.py", "", "hides NVIDIA's own"),
}


def test_tree_keeps_the_rules():
    assert (ROOT / "mpidist" / "__init__.py").exists()
    assert not (found := find_violations(ROOT)), "\n" + "\n".join(found)


def test_checker_accepts_a_sound_tree(tmp_path):
    assert find_violations(write_tree(tmp_path, SOUND)) == []


@pytest.mark.parametrize(("path", "text", "complaint"), BROKEN.values(), ids=BROKEN)
def test_checker_finds_a_violation(tmp_path, path, text, complaint):
    found = find_violations(write_tree(tmp_path, {**SOUND, path: text + "\n"}))
    assert any(complaint in line for line in found), found


def test_find_cycle_in_a_graph_with_a_diamond():
    diamond = {"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}
    assert find_cycle(diamond) == []
    assert find_cycle({**diamond, "d": {"b"}}) == ["b", "d", "b"]


def test_no_module_hides_a_public_name():
    """A module ``mpidist.comm.device``, once imported, would hide the function ``comm.device``."""
    import mpidist.comm

    assert not set(mpidist.comm.__all__) & {
        path.stem for path in (ROOT / "mpidist" / "comm").glob("*.py")
    }
