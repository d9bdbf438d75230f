"""Recipes of Spack and EasyBuild: they run, and require what setup.cfg requires."""

from __future__ import annotations

import ast
import configparser
import contextlib
import re
import sys
from collections import defaultdict
from types import ModuleType

import pytest

import mpidist
from tests.tools.support import ROOT

PACKAGING = ROOT / "packaging"


@pytest.fixture(scope="module")
def declared():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def spec_names(text: str) -> dict[str, str]:
    """Split requirements (`torch>=2.11`) into names and minimum versions."""
    found = (
        re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", line.strip()) for line in text.strip().splitlines()
    )
    return {match[1]: match[2] or "" for match in found if match}


def test_the_version_is_one(declared):
    version = declared["metadata"]["version"]
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert mpidist.__version__ == version and newest is not None and newest[1] == version
    minor = version.rpartition(".")[0]
    for page in ("README.md", "docs/index.md"):
        assert f"\nVersion {minor}. " in (ROOT / page).read_text(encoding="utf-8"), page


def run_spack_recipe(monkeypatch):
    """Execute the recipe as Spack would, with directives that record their arguments."""
    noted = defaultdict(list)
    within: list[str] = []

    def directive(name):
        return lambda *args, **settings: noted[name].append(
            (args, {"when": "".join(within), **settings})
        )

    @contextlib.contextmanager
    def when(condition):
        within.append(condition)
        yield
        within.pop()

    spack, package = ModuleType("spack"), ModuleType("spack.package")
    for name in ("license", "version", "variant", "depends_on"):
        setattr(package, name, directive(name))
    package.when = when
    build_system = ModuleType("spack_repo.builtin.build_systems.python")
    build_system.PythonPackage = type("PythonPackage", (), {})
    modules = {"spack": spack, "spack.package": package, build_system.__name__: build_system}
    for name in ("spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
        modules[name] = ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    names: dict = {}
    exec(compile((PACKAGING / "spack" / "package.py").read_text(), "package.py", "exec"), names)
    return names["PyMpidist"], noted


def test_spack_recipe_asks_for_what_setup_asks_for(declared, monkeypatch):
    recipe, noted = run_spack_recipe(monkeypatch)
    options = declared["options"]
    version = declared["metadata"]["version"]
    assert recipe.pypi == f"mpidist/mpidist-{version}.tar.gz" and noted["version"][0][0] == (
        version,
    )
    assert noted["license"][0][0] == (declared["metadata"]["license_expression"],)
    needs = {args[0]: settings["when"] for args, settings in noted["depends_on"]}
    assert (
        needs["python@3.10:3.13"] == ""
        and options["python_requires"] == ">=3.10"
        and "mpi" in needs
    )
    for condition, wanted in (
        ("", options["install_requires"]),
        ("+cli", declared["options.extras_require"]["cli"]),
    ):
        for name, least in spec_names(wanted).items():
            spec = f"py-{name}@{least}:" if least else f"py-{name}"
            assert any(
                need.split()[0] == spec and when == condition for need, when in needs.items()
            ), (spec, needs)
    assert {name for (name,), _ in noted["variant"]} == {"cuda", "cli"} and needs[
        "py-cupy"
    ] == "+cuda"
    packages = {f"mpidist.{path.parent.name}" for path in (ROOT / "mpidist").glob("*/__init__.py")}
    assert {name for name in recipe.import_modules if "c10d" not in name} <= packages | {"mpidist"}


def test_easybuild_file_asks_for_what_setup_asks_for(declared):
    (path,) = (PACKAGING / "easybuild").glob("*.eb")
    text = path.read_text()
    # EasyBuild's names for parts of a configuration; any other name is an error, as in EasyBuild.
    used = {
        node.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    constants = {"PYPI_SOURCE", "SOURCE_TAR_GZ", "SOURCE_WHL", "SOURCE_PY3_WHL"}
    assert used <= constants | {"name", "version"}
    config = {name: name for name in constants}
    exec(compile(text, path.name, "exec"), config)
    toolchain = config["toolchain"]
    assert (
        path.name
        == f"{config['name']}-{config['version']}-{toolchain['name']}-{toolchain['version']}.eb"
    )
    assert (
        config["version"] == declared["metadata"]["version"]
        and config["easyblock"] == "PythonBundle"
    )
    assert {"homepage", "description", "sanity_check_paths", "moduleclass"} <= config.keys()
    given = {
        name.lower().replace("pytorch", "torch"): version
        for name, version, *_ in config["dependencies"]
    }
    given |= {name: version for name, version, _ in config["exts_list"]}
    given["numpy"] = given["scipy-bundle"]
    wanted = spec_names(declared["options"]["install_requires"]) | spec_names(
        declared["options.extras_require"]["cli"]
    )
    for name, least in wanted.items():
        assert [int(part) for part in given[name].split(".")] >= [
            int(part) for part in least.split(".") if part
        ], name
    for name, _, about in config["exts_list"]:
        (digest,) = about["checksums"]
        assert re.fullmatch("[0-9a-f]{64}", digest or "") or (name == "mpidist" and digest is None)


def test_every_python_that_is_promised_is_tried(declared):
    tried = re.search(
        r"^PYTHONS=\$\{PYTHONS:-([^}]*)\}", (PACKAGING / "pythons.sh").read_text(), re.M
    )
    assert tried and tried[1].split() == ["3.10", "3.11", "3.12", "3.13", "3.14"]
