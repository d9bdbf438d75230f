"""Hooks of the documentation build: rewritten links, tables from records, API directives."""

from __future__ import annotations

import importlib

import pytest

from tests.tools.support import ROOT


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    return importlib.import_module


def test_links_of_the_repository_lead_to_pages(hook):
    links = hook("repository_links")
    site = {
        "docs/a.md": "a.md",
        "CHANGELOG.md": "changelog.md",
        "examples/x.py": "examples/x.md",
        "slurm": "slurm.md",
    }

    def changed(text, source="docs/deep/p.md", page="deep/p.md"):
        return links.rewrite(text, source, page, site, ROOT)

    assert changed("[c](../../CHANGELOG.md#1)") == "[c](../changelog.md#1)"
    assert (
        changed("[x](examples/x.py) and [s](slurm/)", "README.md", "index.md")
        == "[x](examples/x.md) and [s](slurm.md)"
    )
    # A file without a page remains as text; a broken link remains, and fails the build.
    assert changed("[m](../../Makefile) [n](nowhere.md)") == "m [n](nowhere.md)"
    assert (
        links.rebased("[d](../docs/a.md#x) [l](job.sh)", "slurm/README.md", "docs/slurm.md")
        == "[d](a.md#x) [l](../slurm/job.sh)"
    )
    named = links.named(
        ROOT / "examples" / "README.md", {"examples/demo_digits.py": "examples/demo_digits.md"}
    )
    assert "| [`demo_digits.py`](demo_digits.py) |" in named and named.endswith(
        "\n- [demo_digits.py](demo_digits.py)\n"
    )
    for kept in ("[w](https://example.org/a.md)", "[t](#top)", "```\n[c](../../CHANGELOG.md)\n```"):
        assert changed(kept) == kept


def test_tables_have_the_numbers_of_the_record(hook):
    tables = hook("result_tables")
    one = {"median_us": 1234.5}
    record = {
        "environment": {
            "ranks": 2,
            "mpi_library": "M",
            "torch": "2",
            "cpu": "C",
            "logical_cores": 2,
            "date": "2026-01-02T03:04:05",
        },
        "link": "1gbit",
        "results": [
            {
                "operation": "a",
                "size_bytes": 2048,
                "contenders": {"x": one, "y": {"median_us": 0.5}},
            },
            {"operation": "b", "size_bytes": 0, "contenders": {"x": {"median_us": 2.5e6}}},
        ],
    }
    text = tables.section("n", record, True)
    assert "2 ranks, over a simulated link of 1 Gbit/s, M, torch 2, C, 2 cores, 2026-01-02" in text
    assert (
        "| a, 2 KiB | 1.23 ms | 0.5 µs |" in text and "| b | 2.5 s |  |" in text and "n.png" in text
    )
    name, choice = tables.parse('n operations=b,c models="MLP 8.4 M, batch 64;m"')
    assert (name, choice) == (
        "n",
        {"operations": ["b", "c"], "models": ["MLP 8.4 M, batch 64", "m"]},
    )
    assert "| a," not in tables.tables(record, choice)
    assert "µs" not in tables.tables(record, {"contenders": ["x"]})
    assert "n.png" not in tables.section("n", record, True, {"plot": ["no"]})
    with pytest.raises(ValueError, match="no row"):
        tables.tables(record, {"operations": ["z"]})
    with pytest.raises(ValueError, match="no table"):
        tables.tables({"other": 1})
    steps = {
        "model": "m",
        "contenders": {"bare": one | {"bytes_sent": 0}, "hook": one | {"bytes_sent": 3 << 20}},
    }
    assert "| hook | 1.23 ms | 3 MiB |" in tables.tables({"results": [steps]})


def test_tables_name_contenders_as_figures_do_and_show_ours_the_peers_and_the_ratio(hook):
    tables = hook("result_tables")
    own, peer = {"median_us": 3.0}, {"median_us": 2.0}
    one = {"operation": "a", "size_bytes": 8, "contenders": {"native": own, "mpi4py": peer}}
    text = tables.tables({"benchmark": "collectives", "results": [one]})
    assert "| mpidist's own API | mpi4py alone | mpidist's own API / mpi4py alone |" in text
    assert "| a, 8 B | 3 µs | 2 µs | 1.50 |" in text
    step = {"model": "m", "contenders": {"mpidist": own, "torch on Gloo": {"median_us": 400.0}}}
    text = tables.tables({"benchmark": "ddp", "results": [step]})
    assert "| mpidist's DDP / torch's DDP on Gloo | 0.0075 |" in text
    floor = [{"operation": "no-op", "size_bytes": 0}, {"operation": "echo", "size_bytes": 8}]
    calls = {"contenders": {"mpidist": own, "floor": peer}}
    text = tables.tables({"benchmark": "rpc", "results": [one | calls for one in floor]})
    # The floor has no payload.
    assert "| no-op | 3 µs | 2 µs | 1.50 |" in text and "| echo, 8 B | 3 µs | 2 µs |  |" in text
    light, dark = tables.plot("n").split(" ![")
    assert light.endswith("results/n.png#only-light)") and "n-dark.png#only-dark)" in dark


def test_each_recorded_result_that_a_page_names_has_a_table(hook):
    import json
    import re

    tables = hook("result_tables")
    named = [
        text
        for page in (ROOT / "docs").rglob("*.md")
        for text in re.findall(r"<!-- results: (.*?) -->", page.read_text())
    ]
    assert len(named) > 10
    for name, choice in map(tables.parse, named):
        record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        assert tables.tables(record, choice).count("|") > 8 and tables.machine(record)


def test_scaling_reports_have_their_tables(hook):
    tables = hook("scaling_tables")
    step = {
        "link": "1gbit",
        "network": "net",
        "scaling": "weak",
        "hook": "bf16",
        "ranks": 4,
        "oversubscribed": True,
        "seconds": 0.25,
        "exposed_seconds": 0.05,
        "efficiency": 0.8,
        "predicted_seconds": 0.2,
    }
    record = {
        "jobs": [{"ranks": 4}],
        "steps": [step],
        "validation": {
            "points": 9,
            "median_error": 0.12,
            "target": 0.2,
            "verdict": "reached",
            "by_operation": {"all_reduce": 0.1},
            "by_ranks": {},
            "by_rate": {},
            "steps": None,
            "steps_by_link": {},
        },
        "hook_choices": [step | {"fastest": "bf16", "chosen": "none", "lost": 0.03}],
        "predictions": [step | {"ranks": ranks} for ranks in (8, 4096)],
        "hooks_that_pay": [
            {
                "processor": "cpu",
                "network": "net",
                "ranks": 64,
                "fastest": {"1": "bf16", "10": "none"},
                "predicted_seconds": {
                    "1": {"none": 3.0, "bf16": 2.0},
                    "10": {"none": 1.0, "bf16": 2.0},
                },
            }
        ],
    }
    assert tables.is_scaling(record) and not tables.is_startup(record)
    text = tables.tables(record)
    assert (
        "| 1 Gbit/s, net, weak, bf16 | 4 \\* | 250 ms | 50 ms | 0.80 | 200 ms |" in text
        and "**12%**" in text
    )
    assert (
        "| 1 Gbit/s, net | 4 \\* | bf16 | none | 3% |" in text
        and "Beyond 4 ranks nothing was measured" in text
    )
    assert "| cpu, net | bf16 ×1.5 | none |" in text and "|  | 200 ms (0.80) |" in text
    job = {
        "ranks": 2,
        "oversubscribed": False,
        "own_start_s": 0.5,
        "gloo_start_s": 1,
        "rss_mib": 14.25,
        "files": 17,
        "threads": 4,
    }
    text = tables.startup({"jobs": [job | {"group_messages": 3.0}], "growth": {"files": "flat"}})
    assert (
        "| 2 | 0.50 s | 1.00 s | 14.2 MiB | 17 | 4 | 3 |" in text
        and "| growth |  |  |  | flat |" in text
    )


def test_directives_name_the_module_that_defines(hook):
    pages = hook("api_pages")
    text = pages.directives("mpidist.comm", ["init", "SUM"])
    assert (
        "::: mpidist.comm.world_group.init\n" in text
        and "{#mpidist.comm.init}" in text
        and 'id="mpidist.comm.SUM"' in text
    )
    # The page begins with the call that a program begins with.
    assert pages.directives("mpidist.comm").startswith("[](){#mpidist.comm.init}\n")
    with pytest.raises(ValueError, match="no public nothing"):
        pages.directives("mpidist.comm", ["nothing"])


def test_tables_of_modules_have_the_first_sentence_of_each_docstring(hook, tmp_path):
    package = tmp_path / "mpidist" / "comm"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text('"""All."""')
    (package / "__init__.py").write_text('"""ring → group."""')
    (package / "ring.py").write_text('"""Ring of ``W`` ranks\nor | more.\n\nMore text."""')
    expected = "## mpidist/comm\n\nring → group.\n\n| module | contents |\n| --- | --- |\n"
    tables = hook("module_tables").tables(tmp_path)
    assert tables.endswith(expected + "| `ring` | Ring of `W` ranks or \\| more. |")
    (package / "work.py").write_text("")
    with pytest.raises(ValueError, match=r"work\.py has no docstring"):
        hook("module_tables").tables(tmp_path)
