"""Tests that ``make test`` runs on several ranks: each page that README names has its own."""

import re

from tests import promises
from tests.tools.support import ROOT


def test_each_part_of_the_readme_has_tests():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = readme.partition("## What is in it")[2].partition("| you | page |")[0]
    pages = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", parts))
    covered = {*promises.MPI, *promises.JOBS, *promises.IN_TEST_ALL}
    assert len(pages) > 10 and pages <= covered, pages - covered
    assert all((ROOT / page).exists() for page in covered)


def test_the_tests_are_printed_for_a_command_line(capsys):
    for kind, tests in (("mpi", promises.MPI), ("jobs", promises.JOBS)):
        promises.main(kind)
        names = capsys.readouterr().out.split()
        assert names == [name for group in tests.values() for name in group]
        assert all((ROOT / name.partition("::")[0]).exists() for name in names)
