"""Replay of made traces: schedules, traces, networks, timelines, judgement; without SimGrid."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import itertools
import math
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.tools.support import ROOT, missing


@pytest.fixture
def part(monkeypatch):
    for name in ("matplotlib", "psutil", "scipy", "rich"):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(name)


def replayed_s(processes, ranks, latency_s=0.0, byte_s=0.0):
    """Return the seconds of a trace on a network without contention: SimGrid's naive twin."""
    traces = [collections.deque(lines) for lines in processes]
    clocks, sent = [0.0] * len(traces), collections.defaultdict(collections.deque)
    expected = [[] for _ in traces]
    left = set(range(len(traces)))
    while left:
        before = sum(map(len, traces))
        for process in sorted(left):
            while traces[process]:
                own, action, *words = traces[process][0].split()
                assert int(own) == process
                if action == "compute":
                    clocks[process] += int(words[0]) / 1e9
                elif action in ("send", "isend"):
                    is_far = int(words[0]) % ranks != process % ranks
                    took = (latency_s + int(words[2]) * byte_s) if is_far else 0.0
                    sent[process, int(words[0]), words[1]].append(
                        (clocks[process] + took, words[2])
                    )
                elif action in ("recv", "irecv"):
                    expected[process].append((int(words[0]), process, words[1], words[2]))
                if action in ("recv", "waitall"):
                    if any(not sent[key[:3]] for key in expected[process]):
                        if action == "recv":
                            expected[process].pop()
                        break
                    for *key, nbytes in expected[process]:
                        arrived, came = sent[tuple(key)].popleft()
                        assert came == nbytes
                        clocks[process] = max(clocks[process], arrived)
                    expected[process].clear()
                traces[process].popleft()
            if not traces[process]:
                left.discard(process)
        assert sum(map(len, traces)) < before, "the trace cannot go on"
    assert not any(sent.values())
    return max(clocks)


@pytest.mark.parametrize("algorithm", ["recursive doubling", "recursive halving", "ring"])
@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 8), (4, 1001), (8, 3), (16, 1 << 20)])
def test_the_rounds_of_all_ranks_fit_and_add_everything(part, algorithm, ranks, nbytes):
    schedules = part("replay.schedules")
    rounds = [list(schedules.rounds(algorithm, rank, ranks, nbytes)) for rank in range(ranks)]
    for step in range(len(rounds[0])):
        for rank in range(ranks):
            one = rounds[rank][step]
            peer = rounds[one.to][step]
            assert (peer.source, peer.received_bytes) == (rank, one.sent_bytes)
    exchanges = part("scaling.exchanges")
    expected = exchanges.rounds(algorithm, ranks, nbytes)
    assert len(rounds[0]) == sum(count for count, _ in expected)
    sent = sum(one.sent_bytes for own in rounds for one in own)
    assert sent == round(sum(count * each for count, each in expected) * ranks)
    # Each element is added W - 1 times in all, or everywhere in recursive doubling.
    added = sum(one.added_bytes for own in rounds for one in own)
    everywhere = ranks * math.log2(ranks) if algorithm == "recursive doubling" else ranks - 1
    assert added == everywhere * nbytes
    if algorithm == "recursive doubling":
        return
    for operation, of in (
        ("reduce_scatter", schedules.scatter_rounds),
        ("all_gather", schedules.gather_rounds),
    ):
        half = [of(algorithm, rank, ranks, nbytes) for rank in range(ranks)]
        assert sum(one.received_bytes for own in half for one in own) == (ranks - 1) * nbytes
        expected = exchanges.rounds(algorithm, ranks, nbytes, operation)
        assert len(half[0]) == sum(count for count, _ in expected)
        adds = any(one.added_bytes for own in half for one in own)
        assert adds == (operation == "reduce_scatter")


def test_a_ring_takes_any_number_of_ranks_and_bad_schedules_are_refused(part):
    schedules = part("replay.schedules")
    assert len(list(schedules.rounds("ring", 2, 3, 10))) == 4
    for algorithm, ranks, text in (
        ("halves", 4, "no algorithm"),
        ("recursive halving", 6, "power"),
    ):
        with pytest.raises(ValueError, match=text):
            list(schedules.rounds(algorithm, 0, ranks, 8))
        with pytest.raises(ValueError, match=text):
            part("scaling.exchanges").rounds(algorithm, ranks, 8)
    with pytest.raises(ValueError, match="no algorithm 'recursive doubling' of all_gather"):
        part("scaling.exchanges").rounds("recursive doubling", 4, 8, "all_gather")
    with pytest.raises(ValueError, match="no library"):
        schedules.chosen("nccl", 8, 2)


@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_libraries_take_recursive_doubling_for_short_buffers(part, library):
    chosen = part("replay.schedules").chosen
    long = "recursive halving" if library == "mpich" else "ring"
    assert chosen(library, 2048, 64) == "recursive doubling"
    assert chosen(library, 1 << 20, 64) == long
    # Fewer elements than ranks.
    assert chosen(library, 16384, 8192) == "recursive doubling"


@pytest.mark.parametrize("hook", ["none", "bf16", "powersgd-4"])
@pytest.mark.parametrize("compute_s", [1e-4, 1.0])
def test_a_replayed_step_is_the_models_where_nothing_is_shared(part, hook, compute_s):
    steps, traces, schedules = (
        part("scaling.steps"),
        part("replay.traces"),
        part("replay.schedules"),
    )
    ranks, latency, rate = 8, 1e-5, 1e-9
    buckets = steps.buckets_of([(256, 256), (256,), (64, 256)] * 3, bucket_cap_mb=0.25)
    costs = {"bf16": steps.HookCost(1e-9), "powersgd-4": steps.HookCost(2e-9, 1e-5)}
    plan = traces.plan_of(compute_s, buckets, hook, costs)

    def choose(nbytes):
        return schedules.chosen("mpich", nbytes, ranks)

    def wire_s(nbytes):
        return replayed_s(traces.all_reduce(nbytes, ranks, choose(nbytes)), ranks, latency, rate)

    found = replayed_s(traces.step(plan, ranks, choose), ranks, latency, rate)
    expected = steps.overlapped(
        compute_s, plan.ready_s, plan.host_s, [sum(map(wire_s, one)) for one in plan.messages], True
    )
    # Hooks are in the computing, as in the model; flops are whole nanoseconds.
    assert found == pytest.approx(expected, abs=1e-7)


def test_shards_are_gathered_after_the_step(part):
    steps, traces = part("scaling.steps"), part("replay.traces")
    buckets = steps.buckets_of([(64, 64)] * 4, bucket_cap_mb=0.02)
    plans = [traces.plan_of(0.01, buckets, "none", {}, shards, 0.002) for shards in (False, True)]
    assert sum(plans[1].gathered) == 4 * 4 * 64 * 64
    without, with_shards = (
        replayed_s(traces.step(plan, 4, lambda nbytes: "ring"), 4, 0.0, 1e-8) for plan in plans
    )
    gathered_s = 3 / 4 * sum(plans[1].gathered) * 1e-8
    assert with_shards - without == pytest.approx(0.002 + gathered_s, rel=0.02)
    with pytest.raises(ValueError, match="each bucket"):
        traces.StepPlan(1.0, (0.5,), (), ((8,),))
    with pytest.raises(ValueError, match="in order"):
        traces.StepPlan(1.0, (0.5, 0.2), (0.0, 0.0), ((8,), (8,)))


@pytest.mark.parametrize(
    ("kind", "nodes", "parameters"),
    [
        ("fat tree", 512, "2;16,32;1,8;1,1"),
        ("fat tree", 4, "2;2,2;1,1;1,1"),
        ("dragonfly", 512, "16,8;1,1;16,2;2"),
        ("dragonfly", 1024, "32,8;1,1;32,2;1"),
    ],
)
def test_platforms_have_all_nodes(part, kind, nodes, parameters):
    networks = part("replay.networks")
    network = networks.Network(kind, nodes, 100, 1e-6, taper=2)
    (cluster,) = ElementTree.fromstring(networks.platform(network))
    assert cluster.get("topo_parameters") == parameters
    assert cluster.get("radical") == f"0-{nodes - 1}" and cluster.get("bw") == "100Gbps"
    assert networks.hosts(network)[-1] == f"node-{nodes - 1}"


@pytest.mark.parametrize(
    ("kind", "nodes", "text"),
    [
        ("torus", 8, "no network"),
        ("fat tree", 48, "power of two"),
        ("fat tree", 2, "at least 4"),
        ("dragonfly", 32, "64 to 1024"),
        ("pair", 4, "two nodes"),
    ],
)
def test_networks_that_cannot_be_are_refused(part, kind, nodes, text):
    with pytest.raises(ValueError, match=text):
        part("replay.networks").Network(kind, nodes, 100, 1e-6)


def test_the_replayers_output_is_read(part):
    simulator = part("replay.simulator")
    line = "[node-0:0:(1) 0.000040] [smpi_replay/INFO] Simulation time {}\n"
    assert simulator.seconds_of(line.format("0.012345")) == 0.012345
    assert simulator.seconds_of(line.format("1.2e-05")) == 1.2e-5
    with pytest.raises(RuntimeError, match="no time: nothing"):
        simulator.seconds_of("nothing")


def test_without_simgrid_one_line_says_how_to_install_it(part, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench_replay.py", "judge", "--quick"])
    with pytest.raises(SystemExit, match="apt-get install libsimgrid-dev") as ended:
        part("bench_replay").main()
    assert "\n" not in str(ended.value)


def timeline(steps, sizes=(4000, 8000), first=()):
    """Return events of rank 0: 100 us of computing, 10 us of waiting, and all-reduces, a step."""
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"is_main": True}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"is_main": False}},
    ]

    def add(name, kind, track, begin, end, **about):
        events.append(
            {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": track, "ts": begin}
            | {"dur": end - begin, "args": about}
        )

    now = 0.0
    for nbytes in first:
        add("broadcast", "collective", 0, now, now + 5, bytes=nbytes)
        add("all_reduce", "collective", 1, now, now + 5, bytes=nbytes)
        now += 5
    for _ in range(steps):
        add("all_reduce", "collective", 1, now + 60, now + 80, bytes=sizes[0])
        add("all_reduce", "collective", 1, now + 90, now + 110, bytes=sizes[1])
        add("wait", "wait", 0, now + 100, now + 110)
        add("all_reduce", "collective", 7, now, now + 1, bytes=99)
        events[-1]["pid"] = 1
        now += 110
    return events


def test_a_timelines_step_becomes_a_plan(part):
    recorded = part("replay.recorded")
    found = recorded.plan_of(timeline(5, first=(12, 34)))
    assert found.compute_s == pytest.approx(100e-6)
    assert found.ready_s == pytest.approx((60e-6, 90e-6))
    assert found.messages == ((4000,), (8000,))
    # A period of one.
    assert len(recorded.plan_of(timeline(4, sizes=(4000, 4000))).messages) == 1
    for events in ([], timeline(2)):
        with pytest.raises(ValueError, match="at least 3 equal steps"):
            recorded.plan_of(events)


def alpha_beta(latency_s, more=lambda ranks: 1.0):
    """Return a measure in the place of the replayer: latency and rate, and a factor."""

    def measure(network, ranks, processes):
        byte_s = 8 / network.rate_gbit_s / 1e9
        return more(ranks) * replayed_s(processes, ranks, latency_s, byte_s)

    return measure


def test_the_model_is_judged_by_what_a_network_does(part, monkeypatch):
    judgement, networks = part("replay.judgement"), part("replay.networks")
    steps, report = part("scaling.steps"), part("replay.report")
    monkeypatch.setattr(judgement, "SIZES", (1024, 16384, 1 << 18, 1 << 22))
    network = networks.Network("fat tree", 64, 10, 1e-6)
    buckets = steps.buckets_of([(512, 512)] * 4, bucket_cap_mb=1)
    job = judgement.Job("a job", 1e-3, buckets, {"bf16": steps.HookCost(1e-10)})
    ideal = alpha_beta(1e-5)
    one_round = judgement.round_fit(network, ideal)
    fit = judgement.fitted(network, "mpich", one_round, ideal)
    found = judgement.judged_collectives(network, "mpich", fit, [16], ideal)
    assert judgement.median_error(found) < 0.02
    judged = [
        judgement.judged_step(job, network, "mpich", fit, 16, hook, measure)
        for measure in (ideal, alpha_beta(1e-5, lambda ranks: 2.0))
        for hook in ("none", "bf16")
    ]
    assert all(abs(one["relative_error"]) < 0.05 for one in judged[:2])
    assert all(one["relative_error"] == pytest.approx(-0.5, abs=0.05) for one in judged[2:])
    (choice,) = judgement.choices(judged[:2])
    assert choice["fastest"] == choice["chosen"] == "bf16" and choice["lost"] == 0
    first, second = "recursive doubling", "recursive halving"
    crossed = judgement.judged_crossing(network, 16, first, second, one_round, ideal)
    assert crossed["simulated_bytes"] == pytest.approx(crossed["predicted_bytes"], rel=0.2)
    never = judgement.crossing(lambda nbytes: nbytes, lambda nbytes: nbytes + 1.0)
    assert never is None and judgement.crossing(float, lambda nbytes: 0.0) == 1024
    record = {
        "steps": judged, "collectives": found, "choices": [choice],
        "crossings": [crossed, crossed | {"predicted_bytes": None}],
    }  # fmt: skip
    text = report.text_of(record)
    assert "never" in text and "a job" in text and "exposed" in text


@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_rounds_of_few_nodes_say_what_rings_and_shards_of_more_take(part, monkeypatch, library):
    judgement, networks = part("replay.judgement"), part("replay.networks")
    steps = part("scaling.steps")
    monkeypatch.setattr(judgement, "SIZES", (4096, 16384, 1 << 18, 1 << 22))
    network, ideal = networks.Network("fat tree", 64, 10, 1e-6), alpha_beta(1e-5)
    one_round = judgement.round_fit(network, ideal)
    times = judgement.ByAlgorithm(library, one_round)
    found = judgement.judged_collectives(network, library, times, [32], ideal)
    assert all(abs(one["relative_error"]) < 0.01 for one in found)
    job = judgement.Job("a job", 1e-3, steps.buckets_of([(256, 256)] * 3, bucket_cap_mb=0.3), {})
    shards = judgement.judged_shards(job, network, library, one_round, 16, ideal)
    # Between the fitted sizes a time is straight over logarithms.
    assert abs(shards["relative_error"]) < 0.03
    assert shards["simulated_exposed_seconds"] > 0


def run_of(records, nodes=512, **cases):
    """Return a record of one run."""
    assumptions = {"nodes": nodes, "latency_us": 1.0, "overhead_us": 1.0, "taper": 1}
    return {
        "simgrid": "3.32", "runs": [{"nodes": nodes}],
        "assumptions": assumptions | {"fitted_ranks": [2, 4, 8]},
        "choices": [], **{name: cases.get(name, []) for name in records.PARTS},
    }  # fmt: skip


def test_cases_are_added_to_a_record(part):
    records = part("replay.records")

    def case(nbytes, nodes=512, ranks=64, **about):
        where = {"network": "fat tree", "nodes": nodes, "rate_gbit_s": 10.0, "library": "mpich"}
        return {**where, "ranks": ranks, "nbytes": nbytes, **about}

    def step(hook, seconds):
        times = {"simulated_seconds": seconds, "predicted_seconds": seconds}
        return case(0, job="a job", hook=hook) | times

    dragonfly = case(8) | {"network": "dragonfly"}
    old = run_of(
        records,
        collectives=[case(8), case(1024, seconds=1), dragonfly],
        steps=[step("none", 3.0)],
    )
    new = run_of(
        records,
        nodes=1024,
        collectives=[case(8, 1024, 1024), case(1024, seconds=2), case(64)],
        steps=[step("bf16", 2.0)],
    )
    found = records.added(old, new)
    # The newer of two equal cases, and the order of ranks and bytes in each network.
    expected = [case(8), case(64), case(1024, seconds=2), case(8, 1024, 1024), dragonfly]
    assert found["collectives"] == expected
    assert [one["nodes"] for one in found["runs"]] == [512, 1024]
    assert found["assumptions"] == old["assumptions"]
    assert len(found["steps"]) == 2 and found["choices"][0]["fastest"] == "bf16"
    for other, text in (
        (new | {"assumptions": new["assumptions"] | {"taper": 2}}, "has taper 1, and not 2"),
        (new | {"simgrid": "4.0"}, "of SimGrid 3.32, not 4.0"),
    ):
        with pytest.raises(ValueError, match=text):
            records.added(old, other)


def test_a_calibration_takes_the_cable_from_two_ranks(part):
    calibration = part("replay.calibration")
    lines = ["ping_pong 8 4e-05", "all_reduce 8 1e-4", "2 ranks"]
    assert calibration.times_of("\n".join(lines)) == {8: 1e-4}
    job = {
        "collectives": [
            {"operation": "all_reduce", "nbytes": 8, "us": 40.0},
            {"operation": "all_reduce", "nbytes": 1 << 20, "us": 9000.0},
            {"operation": "broadcast", "nbytes": 8, "us": 1.0},
        ]
    }
    network, messages = calibration.parameters(calibration.reduced(job), 1.0)
    assert network.kind == "pair" and network.rate_gbit_s == 1.0
    assert network.latency_s + 2 * messages.overhead_s == pytest.approx(4e-5)
    with pytest.raises(SystemExit, match="no job of two ranks on a link"):
        calibration.run([])
    one = {"link": "1gbit", "ranks": 2, "nbytes": 8, "measured_seconds": 1e-4}
    record = {"results": [one | {"program_seconds": 1.1e-4, "replayed_seconds": 1.2e-4}]}
    text = calibration.text_of(record)
    assert "+20%" in text and "10%" in text


@pytest.mark.long
def test_simgrid_replays_a_step(part):
    simulator, judgement = part("replay.simulator"), part("replay.judgement")
    networks, traces = part("replay.networks"), part("replay.traces")
    if simulator.installed() is None:
        pytest.skip(simulator.MISSING)
    network = networks.Network("fat tree", 64, 10, 1e-6)
    plan = traces.StepPlan(0.01, (0.004, 0.01), (0.0, 0.0), ((1 << 20,), (1 << 22,)))
    found = judgement.replayed(simulator.Messages())(
        network, 8, traces.step(plan, 8, lambda nbytes: "ring")
    )
    least = 0.01 + 2 * 7 / 8 * (1 << 22) * 8 / 10e9
    assert least < found < 1.1 * least
    assert simulator.version() != "unknown"


def test_a_trace_begins_and_ends_each_process(part):
    traces = part("replay.traces")
    found = [list(lines) for lines in traces.all_reduce(4096, 2, "ring", repeats=2)]
    assert len(found) == 2 and found[1][0] == "1 init" and found[1][-1] == "1 finalize"
    assert len(found[1]) == 2 + 2 * 2 * 3
    assert list(itertools.chain(*traces.all_reduce(8, 1, "ring"))) == ["0 init", "0 finalize"]
