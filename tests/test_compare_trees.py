"""Comparison of two source trees: order of the jobs, statistics, verdicts and the record."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.tools.support import ROOT, missing


@pytest.fixture
def trees(monkeypatch):
    for name in ("matplotlib", "psutil", "rich"):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("compare_trees")


def row(benchmark, contender, size_bytes, median_us, is_control=False):
    return {
        "benchmark": benchmark,
        "operation": "step",
        "size_bytes": size_bytes,
        "contender": contender,
        "is_control": is_control,
        "median_us": median_us,
    }


@pytest.fixture
def jobs(trees, monkeypatch, tmp_path):
    """Replace jobs by invented times, and return the list of the jobs that would have run."""
    started = []

    def run(job, limit_s):
        tree = job.variables["PYTHONPATH"]
        started.append((job.name, Path(tree).name, job.variables["OMP_NUM_THREADS"]))
        slow = 2.0 if Path(tree).name == "new" else 1.0
        rows = [
            row(job.name, "mpidist", 8, 10.0 * slow),
            row(job.name, "mpidist", 1 << 20, 100.0),
            row(job.name, "mpi4py", 8, 5.0, is_control=True),
        ]
        about = {"mpi_library": "Open MPI 5.0.8", "ranks": 2}
        return [{"tree": tree, "environment": about, "rows": rows}], None

    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    command = ["compare_trees.py", str(tmp_path / "old"), str(tmp_path / "new"), "--pairs", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path)])
    monkeypatch.setattr(trees.scaling_jobs, "run", run)
    monkeypatch.setattr(trees.timing, "touch_memory", lambda: None)
    return started


def test_the_tree_that_goes_first_alternates(trees, jobs):
    trees.main()
    assert [tree for _, tree, _ in jobs] == ["old", "new"] * 3 + ["new", "old"] * 3
    names = [name for name, _, _ in jobs]
    assert names[:6] == ["collectives", "collectives", "ddp", "ddp", "rpc", "rpc"]
    assert {threads for _, _, threads in jobs} == {"1"}


def test_the_record_holds_medians_ratios_and_verdicts_and_no_path(trees, jobs, tmp_path, capsys):
    trees.main()
    text = (tmp_path / "trees-openmpi-2.json").read_text()
    record = json.loads(text)
    assert str(tmp_path) not in text
    assert record["revisions"] == {"before": "unknown", "after": "unknown"}
    assert record["pairs"] == 2 and len(record["results"]) == 9
    small, large, control = record["results"][:3]
    assert (small["before_us"], small["after_us"]) == (10, 20)
    assert (small["ratio_of_medians"], small["difference_us"]) == (2, 10)
    assert small["before_jobs_us"] == [10, 10] and small["ratio_of_pairs_p90"] == 2
    assert (large["ratio_of_medians"], large["difference_us"]) == (1, None)
    assert control["is_control"] is True
    assert [goal["verdict"] for goal in record["goals"]] == ["not reached"] * 2 + ["reached"] * 2
    printed = capsys.readouterr().out
    # The name of a case may take several lines of its column.
    assert "collectives:" in printed and "8 B, mpidist" in printed and "+10.00" in printed


def test_a_bound_without_cases_is_not_measured(trees):
    assert [one["verdict"] for one in trees.judge([])] == ["not measured"] * 4


def test_a_failed_job_ends_the_comparison(trees, jobs, monkeypatch):
    monkeypatch.setattr(trees.scaling_jobs, "run", lambda job, limit_s: ([], "not ended"))
    with pytest.raises(SystemExit, match="collectives, unknown: not ended"):
        trees.main()


def test_a_job_that_imports_another_tree_is_refused(trees, jobs, monkeypatch):
    found = [{"tree": "elsewhere", "environment": {}, "rows": []}]
    monkeypatch.setattr(trees.scaling_jobs, "run", lambda job, limit_s: (found, None))
    with pytest.raises(SystemExit, match="from another folder"):
        trees.main()
