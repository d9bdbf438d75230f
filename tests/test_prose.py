"""Prose rules: docstrings of modules begin with a noun phrase; lines fit in 100 columns."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.support import ROOT

FOLDERS = ("mpidist", "tests", "benchmarks", "examples")
COLUMNS = 100
_QUESTION = re.compile(r"(What|Which|Who|How|When)\b")


def begins_with_question(source: str) -> bool:
    """Return whether a module's docstring begins with a question word."""
    # The rest of the file is not read: a parse of all files would take seconds.
    spaces = (tokenize.COMMENT, tokenize.NL)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    first = next(token for token in tokens if token.type not in spaces)
    is_text = first.type == tokenize.STRING
    return is_text and bool(_QUESTION.match(inspect.cleandoc(ast.literal_eval(first.string))))


def long_lines(source: str) -> Iterator[int]:
    """Yield the numbers of lines longer than ``COLUMNS``."""
    for number, line in enumerate(source.splitlines(), 1):
        if len(line) > COLUMNS:
            yield number


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_module_docstrings_begin_with_a_noun_phrase():
    found = [
        path for path in _files(*FOLDERS) if begins_with_question(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(str(path.relative_to(ROOT)) for path in found)


def test_lines_of_the_package_fit():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _files("mpidist")
        for number in long_lines(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What a rank sends."""', True),
        ('# A comment.\n"""How ranks wait."""', True),
        ('"""Transport of messages.\n\nWhen a rank polls, it receives."""', False),
        ('"""Whole messages."""', False),
        ("import os", False),
        ('def send():\n    """When called, send."""', False),
    ],
)
def test_question_words_are_found(source, expected):
    assert begins_with_question(source) is expected


def test_long_lines_are_found():
    assert list(long_lines("a" * 100 + "\n" + "a" * 101 + "\n")) == [2]
