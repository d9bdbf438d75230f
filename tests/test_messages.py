"""Texts that the package prints."""

import ast
import re

from tests.tools.support import ROOT


def _literals(tree):
    """Yield the string constants of a module that are not docstrings."""
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            docstrings.add(id(body[0].value))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node


def test_messages_can_be_printed_where_stdout_is_ascii():
    # Other characters would make a user's print(error) raise UnicodeEncodeError under LANG=C or
    # PYTHONIOENCODING=ascii.
    files = [*(ROOT / "mpidist").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    assert len(files) > 50
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    # Only a character outside ASCII, or an escape, gives a literal one.
    suspect = [path for path, text in texts.items() if re.search(r"[^\x00-\x7f]|\\[xuUN0-7]", text)]
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for path in suspect
        for node in _literals(ast.parse(texts[path]))
        if not node.value.isascii()
    ]
    assert not wrong, "\n".join(wrong)
