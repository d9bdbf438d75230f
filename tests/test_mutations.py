"""Mutants: which functions are chosen, and what is changed in one."""

import ast

from tests.mutations import files_of, mutants, used_functions
from tests.test_imports import read_modules, write_tree
from tests.tools.support import ROOT

FUNCTION = '''
def far(count: int | None, limit: float = 3) -> bool | None:
    """A text."""
    note(count)
    if count + 1 < limit and not count:
        raise ValueError("it")
    return True
'''


def test_each_change_is_made_once_and_annotations_stay():
    (node,) = ast.parse(FUNCTION).body
    found = [ast.unparse(one) for one in mutants(node)]
    assert len(found) == len(set(found)) and ast.unparse(node) not in found
    assert all("count: int | None" in text and "bool | None" in text for text in found)
    for change in ("limit: float=4", "count - 1 <", "count + 2 <", "<= limit", "or not count",
                   "return False", "if not", "    pass\n"):  # fmt: skip
        assert any(change in text for text in found), change


def test_the_most_used_functions_come_first(tmp_path):
    tree = {
        "mpidist/__init__.py": "",
        "mpidist/a.py": "def f(): ...\ndef g(): ...\nclass H: ...\n",
        "mpidist/b.py": "from mpidist.a import f, H\n",
        "mpidist/c.py": "from mpidist import a\na.f()\na.g()\n",
    }
    found = used_functions(read_modules(write_tree(tmp_path, tree)))
    assert [(one.name, one.users) for one in found] == [("f", 2), ("g", 1)]


def test_a_module_has_the_tests_that_import_it_its_own_first():
    found = files_of("mpidist.comm.mpi.backoff", ROOT)
    assert found[0] == ROOT / "tests/comm/mpi/test_backoff.py"
