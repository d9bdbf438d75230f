"""The benchmarks run, check their results and record what they promise. No test looks at a time."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support import ROOT, launcher, missing, started

BENCHMARKS = ROOT / "benchmarks"
FOUR_WAYS = ["gloo", "mpi4py", "mpidist", "native"]
OPERATIONS = {
    "all_reduce", "all_reduce_bf16", "broadcast", "reduce", "all_gather_into_tensor", "all_gather",
    "reduce_scatter_tensor", "all_to_all_single", "ping_pong", "barrier",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _libraries(monkeypatch):
    for name in ("matplotlib", "psutil", "tabulate"):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(program: str, tmp_path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*launcher(2, "--bind-to", "none"), sys.executable, str(BENCHMARKS / program), "--output", str(tmp_path), *options]
    return started(command, timeout_s=100)


@pytest.mark.slow
def test_quick_run_records_all_contenders_and_the_environment(tmp_path):
    done = run("bench_collectives.py", tmp_path, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("collectives-*-2.json")
    assert path.with_suffix(".png").stat().st_size > 0
    text = path.read_text()
    record = json.loads(text)
    assert record["results_checked"] is True
    assert {result["operation"] for result in record["results"]} == OPERATIONS
    for result in record["results"]:
        names = list(result["contenders"])
        if result["operation"] == "all_reduce_bf16":
            assert names == ["gloo", "mpidist", "native", "mpidist fp32", "native fp32"]
        else:
            assert names == FOUR_WAYS
        for values in result["contenders"].values():
            assert len(values["rounds_us"]) == record["rounds"]
            assert values["p10_us"] <= values["median_us"] <= values["p90_us"]
    about = record["environment"]
    assert about["ranks"] == 2
    assert len(about["cores_of_ranks"]) == 2
    assert str(ROOT) not in text
    assert record["goals"]


@pytest.mark.slow
def test_ways_to_execute_are_compared_and_recorded(tmp_path):
    done = run("bench_execution.py", tmp_path, "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("execution-*-2-unbound.json")
    record = json.loads(path.read_text())
    assert [result["operation"] for result in record["results"]] == ["latency"] * 4 + ["overlap", "two threads"]
    assert set(record["results"][0]["contenders"]) == {"mpi4py", "caller", "group's thread", "non-blocking"}


@pytest.mark.slow
@pytest.mark.parametrize(("program", "name"), [("bench_ddp.py", "ddp"), ("bench_powersgd.py", "powersgd")])
def test_steps_of_training_are_compared_and_recorded(tmp_path, program, name):
    done = run(program, tmp_path, "--models", "many:2", "--rounds", "1", "--bucket-cap-mb", "1", "--link", "test")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob(f"{name}-*-2-test*.json")
    assert path.with_suffix(".png").stat().st_size > 0
    record = json.loads(path.read_text())
    (result,) = record["results"]
    contenders = result["contenders"]
    assert result["parameters"] == 120 * (128 * 128 + 128)
    bare = [values["median_us"] for label, values in contenders.items() if label.startswith("bare")]
    assert result["bare_us"] == min(bare)
    if name == "ddp":
        assert {"mpidist", "noop_hook", "torch on mpidist", "torch on Gloo", "communication alone"} <= set(contenders)
    else:
        sent = {label: values["bytes_sent"] for label, values in contenders.items()}
        assert sent["bf16_compress_hook"] == sent["allreduce_hook"] / 2
        assert sent["PowerSGD rank 1"] < sent["PowerSGD rank 4"] < sent["bf16_compress_hook"]


@pytest.mark.slow
def test_a_slow_link_is_made_and_removed(tmp_path):
    """Or refused with status 77 and the reason."""
    command = [str(BENCHMARKS / "slow_link.sh"), "1gbit", "echo"]
    before = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False) if shutil.which("ip") else None
    done = subprocess.run([*command, "a", "job"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        assert "slow_link.sh: skipped, " in done.stderr
        return
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split(" : ")  # echo took the first -n for itself
    assert first.startswith("1 ip netns exec mpidist-") and first.endswith("-a a job")
    assert second.startswith("-n 1 ip netns exec mpidist-") and second.strip().endswith("-b a job")
    after = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    assert before is not None and after.stdout == before.stdout, "namespaces were left behind"


def test_a_wrong_result_is_found():
    cases, timing = importlib.import_module("collective_cases"), importlib.import_module("timing")

    class OneRank:
        rank = 0
        raw = SimpleNamespace(allgather=lambda found: [found])

    def case(added: list[float]):
        tensor = torch.empty(2)
        contender = timing.Contender("it", (lambda: tensor.add_(torch.tensor(added)),), (tensor,))
        inputs = [(tensor, np.array([1.0, 2.0], dtype=np.float32))]
        return cases.Case("add", 2, [contender], inputs, lambda k: np.array([2.0, 3.0], dtype=np.float32))

    assert case([1.0, 1.0]).wrong(OneRank) == []
    assert case([1.0, 2.0]).wrong(OneRank) == ["it (call 0) on rank 0"]


def test_comparison_takes_rounds_as_pairs():
    timing = importlib.import_module("timing")
    left = timing.Series("left", 1, 1, (10.0, 20.0, 90.0))
    right = timing.Series("right", 1, 1, (1.0, 4.0, 30.0))
    comparison = timing.compare(left, right)
    assert comparison.ratio_of_rounds == 5.0  # of 10, 5, 3
    assert comparison.ratio_of_medians == 5.0  # 20 / 4
    assert comparison.difference_of_rounds_us == 16.0  # of 9, 16, 60
    assert timing.Series("x", 1, 1, (3.0, 1.0, 2.0)).median_us == 2.0


def test_every_contender_opens_a_round_equally_often():
    timing = importlib.import_module("timing")
    orders = [timing._order(4, round_number) for round_number in range(8)]
    assert [order[0] for order in orders] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_goals_are_reached_missed_or_not_measured():
    goals = importlib.import_module("collective_goals")

    def barrier(ratio: float) -> dict:
        comparison = {"left": "gloo", "right": "mpidist", "ratio_of_rounds": ratio}
        return {"operation": "barrier", "size_bytes": 0, "comparisons": [comparison]}

    def verdict(results: list) -> dict:
        return next(one for one in goals.judge(results) if one["goal"].startswith("barrier"))

    assert verdict([barrier(2.0)])["verdict"] == "reached"
    assert verdict([barrier(2.0), barrier(0.5)])["verdict"] == "not reached"
    assert verdict([barrier(2.0), barrier(0.5)])["worst"] == 0.5
    assert verdict([])["verdict"] == "not measured"
