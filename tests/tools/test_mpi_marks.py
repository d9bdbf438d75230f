"""Stand-in for pytest-mpi: it skips the same tests."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpidist.comm.mpi import runtime
from tests import conftest
from tests.tools.mpi_marks import (
    BOTH_MPIS,
    DEALT_ON_OTHER,
    MpiMarks,
    asked_for,
    at_size,
    least_size,
    may_hold,
)
from tests.tools.support import ROOT, python, started


@pytest.mark.parametrize(
    ("with_mpi", "only_mpi", "skipped"),
    [(False, False, ["mpi"]), (True, False, []), (False, True, ["plain"]), (True, True, [])],
)
def test_options_choose(with_mpi, only_mpi, skipped):
    marked = []
    items = [
        SimpleNamespace(
            keywords={name: True}, add_marker=lambda mark, name=name: marked.append(name)
        )
        for name in ("plain", "mpi")
    ]
    options = {"--with-mpi": with_mpi, "--only-mpi": only_mpi}
    MpiMarks().pytest_collection_modifyitems(SimpleNamespace(getoption=options.get), items)
    assert marked == skipped


@pytest.mark.parametrize(("least", "is_skipped"), [(2, False), (3, True)])
def test_too_few_ranks_skip(monkeypatch, least, is_skipped):
    monkeypatch.setattr(runtime, "world", lambda: SimpleNamespace(size=2))
    item = SimpleNamespace(iter_markers=lambda name: [pytest.mark.mpi(min_size=least).mark])
    try:
        MpiMarks().pytest_runtest_setup(item)
    except pytest.skip.Exception:
        assert is_skipped
    else:
        assert not is_skipped


@pytest.mark.parametrize(
    ("expression", "marks"),
    [
        ("", set()),
        ("mpi and not gpu and not timing", {"mpi"}),
        ("slow and not mpi", {"slow"}),
        ("not mpi and not slow", set()),
        ("mpi or slow", set()),
        ("not (gpu or mpi)", set()),
    ],
)
def test_marks_without_which_nothing_is_chosen(expression, marks):
    assert asked_for(expression) == marks


def test_files_without_a_mark_are_left_out(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("pytestmark = pytest.mark.mpi(min_size=2)")
    (tmp_path / "conftest.py").touch()
    assert (
        may_hold(file, "mpi and not gpu")
        and may_hold(file, "not slow")
        and may_hold(file, "not (mpi or slow)")
        and may_hold(file, "mpi or slow")
    )
    assert not may_hold(file, "slow and not mpi") and may_hold(tmp_path / "conftest.py", "slow")
    # One of its tests may lack a mark that stands at another.
    some = tmp_path / "test_some.py"
    some.write_text("pytestmark = [device]\n@pytest.mark.mpi\ndef test_it(): ...")
    assert not may_hold(file, "not mpi and not slow") and may_hold(some, "not mpi and not slow")


def test_a_file_of_tests_applies_its_marks_itself():
    """``may_hold`` reads one file, so a mark applied elsewhere would hide the file's tests."""
    elsewhere = [
        path
        for path in Path(__file__).parents[1].rglob("*.py")
        if not path.name.startswith("test_")
    ]
    texts = {
        path: path.read_text(encoding="utf-8") for path in elsewhere if path.name != "mpi_marks.py"
    }
    assert len(texts) > 20 and not [
        path for path, text in texts.items() if "mark.mpi" in text or "mark.slow" in text
    ]


def item(name, least=1):
    marks = [pytest.mark.mpi(min_size=least).mark]
    return SimpleNamespace(nodeid=name, keywords={"mpi": True}, iter_markers=lambda name: marks)


def test_cases_are_dealt_to_the_numbers_of_ranks():
    product = [item(f"tests/zero/f[{a}-{b}]") for a in "abcdef" for b in (True, False)]
    on_both = [item(f"tests/ddp/f[{a}-{b}]") for a in "abcdef" for b in (True, False)]
    product_of_comm = [item(f"tests/comm/f[{a}-{b}]") for a in "abcdef" for b in (True, False)]
    large = [item(f"h[{a}]", 3) for a in "abcd"]
    of_four = [item(f"i[{a}]", 4) for a in "abcd"]
    names = [f"k{number}" + "[cpu]" * (number % 2) for number in range(20)]
    singles = [item(name) for name in names]
    near_singles = [item(f"tests/rpc/{name}") for name in names]
    in_comm = [item(f"tests/comm/p{number}", 1 + number % 3) for number in range(10)]
    always = [item(f"m[{a}]") for a in "abcde"]
    for one in always:
        one.keywords["every_case"] = True
    larger = [item(f"n[{a}]", 6) for a in "ab"]
    near, far = item("tests/rpc/n"), item("tests/ddp/n")
    everything = [
        *product,
        *on_both,
        *product_of_comm,
        near,
        far,
        *large,
        *of_four,
        *larger,
        *singles,
        *near_singles,
        *in_comm,
        item("l", 3),
        item("o", 5),
        *always,
    ]

    def names_at(size, items, **options):
        return at_size(everything, size, **options) & {one.nodeid for one in items}

    dealt = [names_at(size, product) for size in (2, 3)]
    assert [len(part) for part in dealt] == [6] * 2 and len(set.union(*dealt)) == len(product)
    assert names_at(1, product) == dealt[0] and not names_at(4, product)
    assert not names_at(2, product, is_other=True)
    dealt = [names_at(size, on_both) for size in (2, 3)]
    dealt += [other := names_at(2, on_both, is_other=True)]
    assert [len(part) for part in dealt] == [4] * 3 and len(set.union(*dealt)) == len(on_both)
    assert names_at(3, on_both, is_other=True) == other
    dealt = [names_at(size, product_of_comm) for size in (2, 3, 4)]
    left = {size: names_at(size, product_of_comm, is_other=True) for size in (2, 3)}
    assert [len(part) for part in dealt] == [3] * 3 and sum(map(len, left.values())) == 3
    assert set.union(*dealt, *left.values()) == {one.nodeid for one in product_of_comm}
    assert names_at(2, [near, far], is_other=True) == {near.nodeid}
    dealt = {size: names_at(size, in_comm, is_other=True) for size in (2, 3)}
    assert all(dealt.values()) and not dealt[2] & dealt[3]
    assert dealt[2] | dealt[3] == {one.nodeid for one in in_comm}
    for one in in_comm:
        sizes = [size for size in (2, 3, 4) if names_at(size, [one])]
        if least_size(one) == 3:
            assert sizes == [3, 4]
        else:
            assert len(sizes) == 1 and (one.nodeid in dealt[2]) == (sizes != [2])
    assert sum(names_at(size, [far]) == {far.nodeid} for size in (2, 3)) == 1
    assert [len(names_at(size, large)) for size in (2, 3, 4)] == [0, 4, 0]
    assert [len(names_at(size, of_four)) for size in (2, 3, 4)] == [0, 0, 4]
    assert len(names_at(1, [*singles, *near_singles])) == 40
    assert not names_at(2, near_singles) and len(names_at(2, near_singles, is_other=True)) == 20
    assert len(names_at(3, near_singles)) == 20 and not names_at(4, near_singles)
    dealt = [names_at(size, singles) for size in (2, 3)]
    assert all(dealt) and sum(map(len, dealt)) == len(set.union(*dealt)) == 20
    assert [("l" in at_size(everything, size)) for size in (1, 2)] == [False] * 2
    assert "l" in at_size(everything, 3) and "l" not in at_size(everything, 4)
    assert not any(names_at(size, [*larger, item("o", 5)]) for size in (1, 2, 3, 4))
    assert all(len(names_at(size, always)) == 5 for size in (1, 2, 3, 4))


def test_the_other_mpi_runs_the_folders_that_cases_are_left_to():
    """Else no job would run those cases."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (line,) = re.findall(r"^mpich-2: TESTS := (.*)$", text, re.MULTILINE)
    assert line.split() == [f"tests/{folder}" for folder in BOTH_MPIS]
    (line,) = re.findall(r"^mpich-3: TESTS := (.*)$", text, re.MULTILINE)
    folders = [path for path in line.split() if not path.endswith(".py")]
    assert folders == [f"tests/{folder}" for folder in DEALT_ON_OTHER]


@pytest.mark.parametrize("marks", [["mpi"], []])
def test_the_log_of_a_phase_is_refused_in_tests_of_all_ranks(marks):
    item = SimpleNamespace(
        nodeid="a.py::test",
        fixturenames=["group", "caplog"],
        listchain=list,
        get_closest_marker=lambda name: name in marks or None,
    )
    if marks:
        with pytest.raises(pytest.UsageError, match=r"a.py::test: caplog drops .*; use logged"):
            conftest.pytest_itemcollected(item)
    else:
        conftest.pytest_itemcollected(item)


@pytest.mark.slow
def test_a_folder_named_mpi_marks_no_test():
    """Within the run of a folder above it, where pytest makes the package's node twice."""
    command = [*python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/comm"]
    comm = ROOT / "tests" / "comm"
    # Of both folders that one file, because the import of all takes seconds.
    others = [
        path
        for path in (*comm.iterdir(), *(comm / "mpi").glob("test_*.py"))
        if path.name not in ("__init__.py", "conftest.py", "mpi", "test_trust.py")
    ]
    options = ["-m", "not mpi", *(f"--ignore={path}" for path in others)]
    done = started([*command, *options], 100)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout
