"""Page of the peers: a block for each suite, and the page in the repository."""

import pytest

from tests.peers import __main__ as command
from tests.peers import page
from tests.peers.outcomes import Row, Verdict
from tests.tools.support import ROOT

PAGE = "# Peers\n\n<!-- peers: a -->\n\nold\n\n<!-- end -->\n\n<!-- peers: b -->\n<!-- end -->\n"


def test_one_block_is_replaced():
    after = page.replaced(PAGE, "a", r"new \1")
    assert page.blocks(after) == {"a": r"new \1", "b": ""}
    assert page.replaced(after, "b", "x").endswith("<!-- peers: b -->\n\nx\n\n<!-- end -->\n")
    assert page.replaced(after, "a", "old") == PAGE
    with pytest.raises(ValueError, match="0 blocks"):
        page.replaced(PAGE, "c", "x")


def test_a_block_has_its_date_its_counts_and_its_rows():
    rows = [Row("a", Verdict.PASSED, 0, 1), Row("b", Verdict.OURS_FAILS, 0, 0, "why")]
    text = page.block("Today.", [("", rows)], all_rows=True)
    assert text.startswith("Today.\n\n2 programs. Passed: 1, fails on mpidist: 1.\n\n| program")
    text = page.block("Today.", [("First", rows), ("Second", rows[:1])], all_rows=False)
    assert "**First**: 2 tests. Passed: 1, fails on mpidist: 1.\n\n| test" in text
    assert text.endswith("**Second**: 1 test. Passed: 1.")


def test_totals():
    rows = [Row("a", Verdict.PASSED), Row("b", Verdict.PEER_FAILS), Row("c", Verdict.GPU)]
    assert page.totals([("x", rows)]).splitlines()[-1] == "| x | 2 | 0 | 0 | 1 | 0 |"


def test_the_page_has_a_block_for_each_suite():
    text = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    assert list(page.blocks(text)) == list(command.NAMES)
