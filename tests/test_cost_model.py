"""Cost model of the scaling benchmark: fits of synthetic data, a simulation, files and refusals."""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.util
import io
import json
import math
import random
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.tools.support import ROOT, missing, started

SIZES = [8 << (2 * power) for power in range(12)]


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    for name in ("matplotlib", "psutil", "scipy", "rich"):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def cost_model():
    return importlib.import_module("scaling.cost_model")


@pytest.fixture
def steps():
    return importlib.import_module("scaling.steps")


@pytest.fixture
def models():
    return importlib.import_module("scaling.model")


TRUTH = (2e-6, 1e-5, 3e-10, 4e-5, 1.1, 5e-6)


def synthetic(cost_model, operation="all_reduce", noise=0.0, rates=(math.inf,)):
    """Return points of known parameters; between nodes if the rate is finite."""
    made = cost_model.Fit(operation, (65536.0, math.inf), (TRUTH, TRUTH))
    generator = random.Random(7)
    points = []
    for rate in rates:
        for ranks in (2, 3, 4, 6, 8):
            n, p = (1, ranks) if rate == math.inf else (2, ranks // 2)
            if rate != math.inf and ranks == 3:
                continue
            for size in SIZES:
                point = cost_model.Point(operation, n, p, size, rate, max(1.0, ranks / 2))
                points.append(
                    replace(
                        point, seconds=made.seconds(point) * (1 + noise * generator.uniform(-1, 1))
                    )
                )
    return points, made


def test_known_parameters_are_found_again_through_noise(cost_model):
    points, truth = synthetic(cost_model, noise=0.1, rates=(math.inf, 10.0, 1.0, 0.1))
    # The ratios of the fitted points follow their noise.
    found = replace(cost_model.fit(points), ratios=())
    for ranks, rate in ((8, math.inf), (4, 10.0), (2, 0.1)):
        for size in (8, 1 << 20, 1 << 25):
            n, p = (1, ranks) if rate == math.inf else (2, ranks // 2)
            point = cost_model.Point("all_reduce", n, p, size, rate)
            assert found.seconds(point) == pytest.approx(truth.seconds(point), rel=0.15)


@pytest.mark.parametrize(
    "operation", ["all_reduce", "average", "all_gather", "reduce_scatter", "broadcast", "barrier"]
)
def test_noise_is_the_error_on_points_that_are_held_out(cost_model, operation):
    points, _ = synthetic(cost_model, operation, noise=0.1, rates=(math.inf,))
    if operation == "barrier":
        points = [replace(point, nbytes=0) for point in points[:: len(SIZES)]]
    fits, errors = cost_model.validate(points)
    assert list(fits) == [operation] and cost_model.median_error(errors) < 0.2
    assert cost_model.median_error([]) is None


def test_held_out_points_are_fitted_to_by_nothing(cost_model):
    points, _ = synthetic(cost_model)
    trained, held_out = cost_model.split(points)
    assert not set(trained) & set(held_out) and set(trained) | set(held_out) == set(points)
    assert {point.ranks for point in trained} == {2, 4} and {point.ranks for point in held_out} == {
        2,
        3,
        4,
        6,
        8,
    }
    assert {point.nbytes for point in trained} == set(SIZES[1::2])
    # Points that are held out do not change the fit.
    fits, _ = cost_model.validate(points)
    chosen = set(trained)
    spoilt = [
        point if point in chosen else replace(point, seconds=1e3 * point.seconds)
        for point in points
    ]
    assert cost_model.validate(spoilt)[0] == fits


def test_rings_of_many_nodes_are_rounds_of_few(cost_model):
    exchanges = importlib.import_module("scaling.exchanges")

    def ring(nodes, nbytes):
        # Messages of 64 KiB and more wait for their receivers.
        message = nbytes / nodes
        round_s = 4e-6 + (1e-6 if message >= 65536 else 0.0) + message * 8 / 100e9
        seconds = 2 * (nodes - 1) * round_s
        return cost_model.Point("all_reduce", nodes, 1, nbytes, 100.0, seconds=seconds)

    sizes = [1 << power for power in range(10, 27, 2)]
    rings = [ring(nodes, nbytes) for nodes in (2, 4, 8) for nbytes in sizes]
    times = exchanges.Exchanges(exchanges.RING, exchanges.fit_round(rings))
    larger = [ring(nodes, nbytes) for nodes in (64, 512) for nbytes in sizes]
    errors = [abs(cost_model.relative_error(times, point)) for point in larger]
    assert max(errors) < 0.2 and sorted(errors)[len(errors) // 2] < 0.01
    # By log2 n latencies they are nowhere near.
    by_terms = cost_model.fit(rings)
    assert abs(cost_model.relative_error(by_terms, ring(512, 1 << 14))) > 0.5
    # A ring of three nodes: four rounds of a third.
    assert times.seconds(ring(3, 3000)) == pytest.approx(4 * 4.08e-6, rel=0.01)
    assert times.seconds(ring(1, 1000)) == 0
    with pytest.raises(ValueError, match="one rank a node"):
        exchanges.fit_round([replace(rings[0], ranks_per_node=2)])


def test_limits_and_order(cost_model):
    points, truth = synthetic(cost_model, noise=0.3, rates=(math.inf, 1.0))
    found = cost_model.fit(points)
    for made in (found, truth):
        assert made.seconds(cost_model.Point("all_reduce", 1, 1, 1 << 20)) == 0
        for n, p in ((1, 4), (2, 2), (4096, 1)):
            at = cost_model.Point("all_reduce", n, p, 0, math.inf if n == 1 else 1.0)
            seconds = [
                made.seconds(replace(at, nbytes=size)) for size in range(0, 1 << 25, 9 << 17)
            ]
            assert seconds == sorted(seconds) and seconds[0] > 0
        more = [
            made.seconds(cost_model.Point("all_reduce", 1 << power, 1, 1 << 22, 1.0))
            for power in range(1, 13)
        ]
        assert more == sorted(more)
        faster = [
            made.seconds(cost_model.Point("all_reduce", 4, 1, 1 << 22, rate))
            for rate in (0.1, 1.0, 10.0)
        ]
        assert faster == sorted(faster, reverse=True)
    assert min(min(row) for row in found.parameters) >= 0


def test_ranks_that_share_a_core_take_turns(cost_model):
    made = cost_model.Fit("all_reduce", (math.inf,), (TRUTH,))
    at = cost_model.Point("all_reduce", 1, 4, 1 << 20)
    turns = TRUTH[-1]
    assert made.seconds(replace(at, share=2.0)) == pytest.approx(2 * made.seconds(at) + 2 * turns)
    between = cost_model.Point("all_reduce", 2, 1, 1 << 20, 1.0)
    host = TRUTH[2] * (1 << 20)  # received bytes are copied once
    assert made.seconds(replace(between, share=2.0)) == pytest.approx(
        made.seconds(between) + host + turns
    )


def test_what_the_terms_miss_is_kept_between_fitted_sizes(cost_model):
    """Times that rise and fall about those of the terms, more often than there are ranges."""
    points, _ = synthetic(cost_model, rates=(math.inf, 1.0))
    bumpy = [
        replace(one, seconds=one.seconds * 2 ** math.sin(math.log2(one.nbytes) / 2.5))
        for one in points
    ]
    fits, errors = cost_model.validate(bumpy)
    found = fits["all_reduce"]
    alone = replace(found, ratios=())
    fitted, held_out = cost_model.split(bumpy)
    assert sum(found.seconds(one) == pytest.approx(one.seconds) for one in fitted) > 10
    by_terms = [{"relative_error": cost_model.relative_error(alone, one)} for one in held_out]
    assert cost_model.median_error(errors) < 0.7 * cost_model.median_error(by_terms)
    # Beyond the largest fitted size the terms count.
    far = replace(fitted[0], nbytes=1 << 30)
    assert found.seconds(replace(far, nbytes=1 << 31)) > found.seconds(far)


def test_a_job_on_a_machine_that_computed_slower_is_told_by_its_pace(cost_model, models):
    made = cost_model.Fit("all_reduce", (math.inf,), (TRUTH,))
    at = cost_model.Point("all_reduce", 1, 4, 1 << 20)
    assert made.seconds(replace(at, pace=1.5)) == pytest.approx(1.5 * made.seconds(at))
    jobs = [of_job(1), of_job(2), of_job(4)]
    jobs[2]["steps"][0]["us"]["noop"] *= 1.5
    compute = {"512x4": {64: 0.1}}
    paces = {one.ranks: one.pace for one in models.points_of(jobs, compute, 1.0)}
    assert paces == {2: pytest.approx(1.0), 4: pytest.approx(1.5)}
    assert {one.pace for one in models.points_of(jobs)} == {1.0}
    between = of_job(2, 2, "1gbit")
    between["steps"][0]["us"]["noop"] *= 1.5
    assert {one.pace for one in models.points_of([between], compute, 1.0)} == {1.0}


def test_the_time_that_transfers_take_from_computing_is_fitted_to_a_part_of_the_steps(
    models, steps
):
    """Jobs whose steps take 5 ms a message more than their collectives say."""

    def job(ranks, nodes=1, link=""):
        made = of_job(ranks, nodes, link)
        large = {**made["steps"][0], "network": "9x9", "parameters": 2_000_000}
        for key in ("us", "exposed_us"):
            large[key] = dict(large[key])
        made["steps"] = [*made["steps"], large]
        return made

    jobs = [job(1), job(2), job(4), job(2, 2, "1gbit"), job(4, 2, "1gbit")]
    plain = replace(models.fitted(jobs)[0], contention={})
    wanted = steps.Contention(5e-3, 0.0)
    known = replace(plain, contention={models.NODE: wanted, models.BETWEEN: wanted})
    for one in jobs[1:]:
        for entry in one["steps"]:
            for hook in entry["exposed_us"]:
                seconds = models.predicted(known, one, entry, hook).seconds
                entry["us"][hook] = 1e6 * seconds
                entry["exposed_us"][hook] = 1e6 * seconds - entry["us"]["noop"]
    found = models.contention_of(plain, jobs, models.BETWEEN)
    assert found.message_s == pytest.approx(5e-3, rel=0.05) and found.byte_s < 1e-10
    model = replace(plain, contention={models.BETWEEN: found})
    entries = [one for one in models.measured_steps(model, jobs) if one["ranks"] > 1]
    assert {one["network"] for one in entries if one["fitted"]} == {"512x4"}
    assert all(abs(one["relative_error"]) < 0.02 for one in entries if one["nodes"] == 2)
    # Ranks with a machine each take no cores from each other.
    apart = {**jobs[3], "machines": 2}
    step = models.predicted(model, apart, apart["steps"][0], "none")
    assert step == models.predicted(plain, apart, apart["steps"][0], "none")


def test_points_that_nothing_can_be_fitted_to_are_refused(cost_model):
    point = cost_model.Point("all_reduce", 1, 2, 8, seconds=1.0)
    for points in (
        [],
        [replace(point, ranks_per_node=1)],
        [point, replace(point, operation="barrier")],
    ):
        with pytest.raises(ValueError, match="one operation"):
            cost_model.fit(points)
    with pytest.raises(ValueError, match="above 0"):
        cost_model.fit([replace(point, seconds=0.0)])
    assert [cost_model.rate_of(link) for link in ("", "10gbit", "100mbit")] == [math.inf, 10.0, 0.1]
    for link in ("fast", "xgbit"):
        with pytest.raises(ValueError):  # noqa: PT011, float() says it of the second
            cost_model.rate_of(link)


def simulated(compute, ready, host, wire, beside, tick):
    """Return a step's length, simulated by ticks with one processor and one ordered channel."""
    computed = step = 0
    # Remaining bytes of each bucket on the channel.
    queue: collections.deque[int] = collections.deque()
    waiting = list(zip(ready, host, wire, strict=True))
    # Tasks of the processor: kind, remaining time, bytes on the wire after it.
    own: collections.deque[tuple[str, int, int]] = collections.deque()
    while True:
        while waiting and waiting[0][0] <= computed and not own:
            _, hook, sent = waiting.pop(0)
            own.append(("hook", hook, sent))
        if own and own[0][1] == 0:
            kind, _, sent = own.popleft()
            if kind == "hook" and beside:
                queue.append(sent)
            elif kind == "hook":
                own.append(("wire", sent, 0))
            continue
        while queue and queue[0] == 0:
            queue.popleft()
        if computed >= compute and not own and not queue and not waiting:
            return step * tick
        if queue:
            queue[0] -= 1
        if own:
            kind, left, sent = own[0]
            own[0] = (kind, left - 1, sent)
        elif computed < compute:
            computed += 1
        step += 1


@pytest.mark.parametrize("beside", [True, False])
def test_overlap_is_that_of_a_simulation_in_ticks(steps, beside):
    generator = random.Random(3)
    for _ in range(60):
        compute = generator.randint(1, 60)
        ready = sorted(generator.randint(0, compute) for _ in range(generator.randint(0, 6)))
        host = [generator.randint(0, 5) for _ in ready]
        wire = [generator.randint(0, 20) for _ in ready]
        expected = simulated(compute, ready, host, wire, beside, 1)
        assert steps.overlapped(compute, ready, host, wire, beside) == expected


def test_bytes_of_hooks(steps):
    bucket = steps.Bucket(((100, 50), (7,)), 1.0)
    assert steps.messages(bucket, "none") == (4 * 5007,) and steps.messages(bucket, "bf16") == (
        2 * 5007,
    )
    assert steps.messages(bucket, "powersgd-2") == (4 * (2 * 100 + 7), 4 * 2 * 50)
    assert steps.messages(bucket, "powersgd-40") == (4 * 5007,)  # it would not shrink
    with pytest.raises(ValueError, match="powersgd-16"):
        steps.messages(bucket, "gzip")
    buckets = steps.buckets_of([(100, 50), (7,)] * 3, 0.02)
    assert sum(one.numel for one in buckets) == 3 * 5007 and len(buckets) > 1
    shares = [one.ready for one in buckets]
    assert shares == sorted(shares) and shares[0] > 1 / 3 and shares[-1] == pytest.approx(1)


def test_a_step_alone_computes_and_one_among_many_waits(cost_model, steps):
    fits = {name: cost_model.Fit(name, (math.inf,), (TRUTH,)) for name in ("all_reduce", "average")}
    costs = {"bf16": steps.HookCost(1e-9)}
    buckets = steps.buckets_of([(1000, 1000)] * 4, 4.0)
    alone = steps.step(0.1, buckets, "none", steps.Layout(1, 1), fits, costs)
    assert (alone.seconds, alone.exposed_s, alone.sent_bytes) == (0.1, 0.0, 16_000_000)
    slow, fast = (
        steps.step(0.1, buckets, "none", steps.Layout(64, 1, rate), fits, costs)
        for rate in (1.0, 1000.0)
    )
    assert slow.seconds > fast.seconds >= 0.1
    halved = steps.step(0.1, buckets, "bf16", steps.Layout(64, 1, 1.0), fits, costs)
    assert halved.sent_bytes == 8_000_000 and 0.1 < halved.seconds < slow.seconds
    assert (
        steps.step(0.1, buckets, "none", steps.Layout(1, 2, share=3.0), fits, costs).seconds > 0.3
    )
    crowded = steps.step(0.1, buckets, "bf16", steps.Layout(1, 1, crowding=1.5), fits, costs)
    assert crowded.seconds == pytest.approx(1.5 * (0.1 + 4e6 * 1e-9))
    assert steps.compute_of({4: 0.1, 8: 0.3}, 6) == pytest.approx(0.2) and steps.compute_of(
        {4: 0.1}, 8
    ) == pytest.approx(0.2)


def test_ranks_of_one_machine_slow_the_computing_of_each_other(steps, models):
    """By the steps that communicate nothing: those with a hook may take any time."""

    def job(ranks, machines, noop_us, oversubscribed=False):
        network = {"network": "2x2", "batch": 4, "parameters": 10, "exposed_us": {}}
        both = [
            {**network, "scaling": "weak", "us": {"noop": noop_us, "none": 9e9}},
            {**network, "scaling": "strong", "us": {"noop": 9e9, "none": 9e9}},
        ]
        place = {"ranks": ranks, "machines": machines, "cores": 2, "link": "", "nodes": 1}
        place |= {"ranks_per_node": ranks, "oversubscribed": oversubscribed}
        return {**place, "collectives": [], "steps": both if ranks > 1 else both[:1]}

    jobs = [job(1, 1, 1e6), job(2, 1, 1.4e6), job(4, 1, 3.2e6, True), job(3, 1, 9e6)]
    model, _ = models.fitted(jobs)
    # 1.4 and, of two ranks on a core, 1.6.
    assert model.crowding == pytest.approx(1.5)
    assert models.layout_of(jobs[1], model.crowding).crowding == pytest.approx(1.5)
    alone, apart = models.layout_of(jobs[0], 1.5), models.layout_of(job(2, 2, 1e6), 1.5)
    assert alone.crowding == apart.crowding == 1.0
    assert models.fitted([jobs[0], job(2, 2, 1.4e6)])[0].crowding == 1.0
    assert models.fitted([jobs[0], job(2, 1, 0.9e6)])[0].crowding == 1.0


def of_job(ranks, nodes=1, link="", oversubscribed=False):
    """Return a record in the format of ``measure``."""
    slow = {"10gbit": 8e-10, "1gbit": 8e-9, "100mbit": 8e-8}.get(link, 0.0)
    points = [
        {
            "operation": name,
            "nbytes": size,
            "us": 1e6 * (1e-5 + size * slow + size * 1e-11),
            "p90_us": 0.0,
        }
        for name in ("all_reduce", "average")
        for size in SIZES
    ]
    us = {
        "bare": 9e4,
        "noop": 1e5,
        "none": 1e5 * (1 + nodes),
        "bf16": 1.3e5,
        "powersgd-1": 1.1e5,
        "powersgd-4": 1.2e5,
    }
    one = {
        "network": "512x4",
        "parameters": 1_050_624,
        "shapes": [[512, 512], [512]] * 4,
        "buckets": [],
    }
    one |= {
        "scaling": "weak",
        "batch": 64,
        "us": us,
        "exposed_us": {name: us[name] - 1e5 for name in list(us)[2:]},
    }
    memory = dict.fromkeys(
        ("rss_before_mib", "pss_before_mib", "rss_mib", "pss_mib", "device_mib"), 1.0
    )
    about = {"mpi_library": "Open MPI 5.0.11", "cpu": "a", "torch": "2", "ranks": ranks}
    return {
        "benchmark": "scaling", "environment": about, "link": link, "bucket_cap_mb": 1.0,
        "ranks": ranks, "nodes": nodes, "ranks_per_node": ranks // nodes, "machines": 1, "cores": 2,
        "oversubscribed": oversubscribed, "collectives": points if ranks > 1 else [],
        "steps": [one], "memory": memory,
    }  # fmt: skip


@pytest.mark.slow
def test_a_report_keeps_measured_and_predicted_apart(models, tmp_path, monkeypatch):
    jobs = [
        of_job(1),
        of_job(2),
        of_job(4, oversubscribed=True),
        *(of_job(2, 2, link) for link in ("1gbit", "100mbit")),
    ]
    scaling_report, bench = (
        importlib.import_module("scaling.report"),
        importlib.import_module("bench_scaling"),
    )
    said = scaling_report.write(jobs, {"8 ranks": "not ended after 1 s"}, tmp_path)
    record = json.loads((tmp_path / "scaling-openmpi.json").read_text())
    assert (tmp_path / "scaling-openmpi.png").stat().st_size > 0
    assert record["jobs_without_result"] == {"8 ranks": "not ended after 1 s"}
    assert {entry["ranks"] for entry in record["predictions"] if entry["beyond_measured"]} == {
        1 << p for p in range(3, 13)
    }
    assert "PREDICTED" in said and "beyond 4 ranks nothing was measured" in said and " 4*" in said
    assert not any("predicted_seconds" in one for one in record["steps"] if one["ranks"] == 1)
    shared = [one for one in record["steps"] if one["oversubscribed"]]
    assert shared and all(
        one["efficiency"] == pytest.approx(2 * 1e5 / (1e6 * one["seconds"])) for one in shared
    )
    assert {one["fastest"] for one in record["hook_choices"]} == {"powersgd-1"}
    assert record["validation"]["points"] == len(record["held_out"]) > 0
    model = models.from_json(record["model"])
    assert scaling_report.finite(models.to_json(model)) == record[
        "model"
    ] and "Infinity" not in json.dumps(record)
    before = {key: value for key, value in record["model"].items() if key != "crowding"}
    for other in ({"terms": ["other"]}, before):
        with pytest.raises(ValueError, match="write it again"):
            models.from_json(other)
    # The records of single jobs and of a sweep are merged alike.
    single = tmp_path / "one.json"
    single.write_text(json.dumps(of_job(8, oversubscribed=True)))
    monkeypatch.setattr(importlib.import_module("harness.plots"), "beside", str)
    bench._report(
        SimpleNamespace(
            files=[tmp_path / "scaling-openmpi.json", single], output=tmp_path / "again"
        )
    )
    again = json.loads((tmp_path / "again" / "scaling-openmpi.json").read_text())
    assert sorted(job["ranks"] for job in again["jobs"]) == [1, 2, 2, 2, 4, 8]


def asked(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["bench_scaling.py", *map(str, words)])
    importlib.import_module("bench_scaling").main()
    return capsys.readouterr().out


def test_advice_follows_the_bandwidth_and_says_what_it_assumes(monkeypatch, capsys, tmp_path):
    jobs = [of_job(1), of_job(2), *(of_job(2, 2, link) for link in ("10gbit", "100mbit"))]
    models = importlib.import_module("scaling.model")
    model, _ = models.fitted(jobs)
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model": models.to_json(model)}))
    case = [
        "advise",
        "--processor",
        "cpu",
        "--parameters",
        "2e6",
        "--ranks",
        64,
        "--compute-ms",
        100,
        "--model",
        path,
        "--bandwidth",
    ]
    slow, fast = asked(monkeypatch, capsys, *case, 0.1), asked(monkeypatch, capsys, *case, 1000)
    assert (
        "powersgd-1 is the fastest (PREDICTED)" in slow
        and "none is the fastest (PREDICTED)" in fast
    )
    assert "computing 100.0 ms a step (given)" in slow and "latencies as measured" in slow
    assert "is the fastest (PREDICTED)" in asked(
        monkeypatch, capsys, *case, 25, "--processor", "gpu"
    )
    for words, reason in (
        ([*case, -1], "bandwidth above 0"),
        ([*case, 1, "--ranks-per-node", 3], "multiple of"),
        ([*case, 1, "--parameters", "inf"], "2"),
        ([*case, 1, "--parameters", "1e300"], "2"),
        ([*case, 1, "--bucket-cap-mb", 0], "2"),
        ([*case, 1, "--bucket-cap-mb", "nan"], "2"),
        ([*case, 1, "--measure", "--launcher", "'"], "2"),
        ([*case, 1, "--measure", "--launcher", "gone-launcher"], "gone-launcher does not start"),
        ([*case[:-3], "--model", tmp_path / "none.json", "--bandwidth", 1], "no model"),
        (["sweep", "--links", "fast"], "2"),
        (["measure", "--networks", "1024"], "2"),
        (["sweep", "--jobs", "0"], "2"),
        (["report", tmp_path / "none.json"], "cannot be read"),
        (["report", path], "no record of"),
    ):
        with pytest.raises(SystemExit, match=reason):
            asked(monkeypatch, capsys, *words)


def test_the_processor_is_seen_or_asked_and_never_assumed(monkeypatch, capsys):
    answer = importlib.import_module("scaling.answer")
    case = ["advise", "--parameters", "350e6", "--ranks", 64, "--bandwidth", 100]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    closed = SimpleNamespace(isatty=lambda: False)
    monkeypatch.setattr(answer, "sys", SimpleNamespace(stdin=closed, stderr=closed))
    with pytest.raises(SystemExit, match="--processor gpu, or --processor cpu"):
        asked(monkeypatch, capsys, *case)
    gpu, cpu = (asked(monkeypatch, capsys, *case, "--processor", name) for name in ("gpu", "cpu"))
    assert "powersgd-4 is the fastest" in gpu and "gpu (given)" in gpu
    assert "none is the fastest" in cpu and "cpu (given)" in cpu
    # A person at a terminal is asked.
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(answer, "sys", SimpleNamespace(stdin=terminal, stderr=io.StringIO()))
    answer.sys.stderr.isatty = lambda: True
    monkeypatch.setattr("builtins.input", lambda *words: "gpu")
    assert "gpu (answered)" in asked(monkeypatch, capsys, *case)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A")
    assert "gpu (NVIDIA A is seen here)" in asked(monkeypatch, capsys, *case)


def test_advice_needs_no_packages_for_plots_and_fits():
    program = """
        import sys
        sys.modules.update(dict.fromkeys(("matplotlib", "scipy", "psutil")))
        sys.path.insert(0, "benchmarks")
        import bench_scaling
        common = ["--parameters", "350e6", "--ranks", "64"]
        for words in (["--bandwidth", "100", "--processor", "gpu"], ["memory"]):
            sys.argv = ["bench_scaling.py", "advise", *common, *words]
            bench_scaling.main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = started(command, 100, {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "powersgd-4 is the fastest" in done.stdout and "MiB on the fullest" in done.stdout


def test_advice_on_memory_adds_what_a_rank_holds(monkeypatch, capsys):
    case = ["advise", "memory", "--parameters", "1048576", "--ranks", 8]
    whole = asked(monkeypatch, capsys, *case)
    # Parameters, buckets and two moments in fp32: 16 bytes a parameter.
    assert "16 MiB on the fullest rank (PREDICTED)" in whole and "state of adam" in whole
    flat = asked(
        monkeypatch, capsys, *case, "--partition", "flat", "--activations-mib", 5, "--dtype",
        "bfloat16", "--copy-gradients",
    )  # fmt: skip
    # Three times 2 MiB, an eighth of 4 MiB, and 5.
    assert "12 MiB on the fullest rank" in flat and "activations, as given" in flat
    assert "state of sgd" not in asked(monkeypatch, capsys, *case, "--optimizer", "sgd")
    for words, reason in (
        (["--activations-mib", -1], "from 0 up"),
        (["--activations-mib", "inf"], "from 0 up"),
        (["--partition", "no"], "2"),
        (["--parameters", 5], "2"),
    ):
        with pytest.raises(SystemExit, match=reason):
            asked(monkeypatch, capsys, *case, *words)
    with pytest.raises(SystemExit, match="--bandwidth above 0"):
        asked(monkeypatch, capsys, "advise", *case[2:])


def test_costs_of_hooks_on_a_gpu_come_from_the_record_of_its_kernels():
    advice = importlib.import_module("scaling.advice")
    costs = advice.gpu_costs(json.loads(advice.GPU_FILE.read_text()))
    each = {hook: cost.element_s for hook, cost in costs.items()}
    assert set(each) == {"bf16", "powersgd-1", "powersgd-4", "powersgd-16"}
    assert 0 < each["bf16"] < each["powersgd-1"] and each["powersgd-4"] <= each["powersgd-16"]


def test_growth_is_described_in_words():
    growth = importlib.import_module("scaling.startup").growth
    assert growth([(2, 10), (32, 12)]) == "flat" and growth([(2, 1), (32, 2)]) == "flat"
    assert growth([(2, 10), (32, 50)]) == "logarithmic" and growth([(2, 10), (32, 160)]) == "faster"


def test_calls_are_counted_on_communicators_and_those_made_of_them():
    counted = importlib.import_module("scaling.counted_communicator")

    class Comm:
        def __init__(self, other=None):
            self.of = other

        def __getattr__(self, name):
            raise AttributeError(name)

        def allgather(self, value):
            return [value]

        def Idup(self):
            return Comm(self), SimpleNamespace(Wait=lambda: None)

    for name in (*counted._MESSAGES, *counted._MAKERS):
        setattr(Comm, name, lambda self, *args: Comm(self))
    counts: collections.Counter[str] = collections.Counter()
    comm = counted.counted(Comm(), counts)
    made, _ = comm.Idup()
    assert made.Split(0).allgather(3) == [3]
    made.Send(b"")
    assert counted.counts_by_kind(counts, "x") == {
        "x_collectives": 1.0,
        "x_makers": 2.0,
        "x_messages": 1.0,
    }


def test_a_job_that_fails_says_why_and_one_that_lasts_is_ended(tmp_path):
    jobs = importlib.import_module("scaling.jobs")
    here = (sys.executable, "-c")
    found, why = jobs.run(jobs.Job("it", (*here, "raise ValueError('no such thing')")), 60)
    assert not found and why == "ended with status 1: ValueError: no such thing"
    assert jobs.run(jobs.Job("it", (*here, "import time; time.sleep(600)")), 0.2) == (
        [],
        "not ended after 0.2 s",
    )
    assert (
        jobs.run(
            jobs.Job(
                "it", (*here, "import sys; sys.exit('skipped, no root') if 0 else sys.exit(77)")
            ),
            60,
        )[1]
        == "skipped"
    )
    assert "mpirun" in jobs.why_no_link(tmp_path)
    gone = jobs.run(jobs.Job("it", (str(tmp_path / "gone"),)), 60)
    assert gone == ([], f"{tmp_path / 'gone'} does not start: No such file or directory")


def test_the_page_has_all_options_of_advise():
    options = importlib.import_module("scaling.options")
    commands = argparse.ArgumentParser().add_subparsers()
    options.add_commands(commands)
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    names = [
        name for action in commands.choices["advise"]._actions for name in action.option_strings
    ]
    assert len(names) > 15
    assert [name for name in names if name.startswith("--") and f"`{name}`" not in page] == [
        "--help"
    ]
