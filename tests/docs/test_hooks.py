"""What the build adds to the pages: links that fit the site, tables from records, directives of the reference."""

from __future__ import annotations

import importlib

import pytest

from tests.support import ROOT


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    return importlib.import_module


def test_links_of_the_repository_lead_to_pages(hook):
    links = hook("repository_links")
    site = {"docs/a.md": "a.md", "CHANGELOG.md": "changelog.md", "examples/x.py": "examples/x.md", "slurm": "slurm.md"}

    def changed(text, source="docs/deep/p.md", page="deep/p.md"):
        return links.rewrite(text, source, page, site, ROOT)

    assert changed("[c](../../CHANGELOG.md#1)") == "[c](../changelog.md#1)"
    assert changed("[x](examples/x.py) and [s](slurm/)", "README.md", "index.md") == "[x](examples/x.md) and [s](slurm.md)"
    # A file without a page stays as its text; what is nowhere stays a link, which fails the build.
    assert changed("[m](../../Makefile) [n](nowhere.md)") == "m [n](nowhere.md)"
    for kept in ("[w](https://example.org/a.md)", "[t](#top)", "```\n[c](../../CHANGELOG.md)\n```"):
        assert changed(kept) == kept


def test_tables_have_the_numbers_of_the_record(hook):
    tables = hook("result_tables")
    one = {"median_us": 1234.5}
    record = {
        "environment": {
            "ranks": 2, "mpi_library": "M", "torch": "2", "cpu": "C", "logical_cores": 2, "date": "2026-01-02T03:04:05",
        },
        "link": "1gbit",
        "results": [
            {"operation": "a", "size_bytes": 2048, "contenders": {"x": one, "y": {"median_us": 0.5}}},
            {"operation": "b", "size_bytes": 0, "contenders": {"x": {"median_us": 2.5e6}}},
        ],
    }  # fmt: skip
    text = tables.section("n", record, True)
    assert "2 ranks, over a simulated link of 1 Gbit/s, M, torch 2, C, 2 cores, 2026-01-02" in text
    assert "| a, 2 KiB | 1.23 ms | 0.5 µs |" in text and "| b | 2.5 s |  |" in text and "n.png" in text
    name, choice = tables.parse('n operations=b,c models="MLP 8.4 M, batch 64;m"')
    assert (name, choice) == ("n", {"operations": ["b", "c"], "models": ["MLP 8.4 M, batch 64", "m"]})
    assert "| a," not in tables.tables(record, choice)
    assert "µs" not in tables.tables(record, {"contenders": ["x"]})
    assert "n.png" not in tables.section("n", record, True, {"plot": ["no"]})
    with pytest.raises(ValueError, match="no row"):
        tables.tables(record, {"operations": ["z"]})
    with pytest.raises(ValueError, match="no table"):
        tables.tables({"other": 1})
    steps = {"model": "m", "contenders": {"bare": one | {"bytes_sent": 0}, "hook": one | {"bytes_sent": 3 << 20}}}
    assert "| hook | 1.23 ms | 3 MiB |" in tables.tables({"results": [steps]})


def test_each_recorded_result_that_a_page_names_has_a_table(hook):
    import json
    import re

    tables = hook("result_tables")
    named = [text for page in (ROOT / "docs").rglob("*.md") for text in re.findall(r"<!-- results: (.*?) -->", page.read_text())]
    assert len(named) > 10
    for name, choice in map(tables.parse, named):
        record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        assert tables.tables(record, choice).count("|") > 8 and tables.machine(record)


def test_directives_name_the_module_that_defines(hook):
    pages = hook("api_pages")
    text = pages.directives("mpidist.comm", ["init", "SUM"])
    assert "::: mpidist.comm.group.init\n" in text and "{#mpidist.comm.init}" in text and 'id="mpidist.comm.SUM"' in text
    with pytest.raises(ValueError, match="no public nothing"):
        pages.directives("mpidist.comm", ["nothing"])
