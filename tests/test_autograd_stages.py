"""Stages of a step of distributed autograd: pieces of spans, and whose time a wait is."""

from __future__ import annotations

import pytest

from tests.tools.support import ROOT, missing


@pytest.fixture
def stages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    try:
        from rpc import autograd_stages
    except ImportError as error:
        missing(f"{error.name} is not installed")
    return autograd_stages


@pytest.fixture
def span(stages):
    def make(stage, begin_ns, end_ns, thread=1):
        return stages.Span(stages.NAMES.index(stage), thread, begin_ns, end_ns)

    return make


def test_time_is_of_the_innermost_span(stages, span):
    spans = [span("call", 10, 90), span("program", 0, 100), span("header", 20, 30)]
    assert stages.exclusive(spans) == [
        (0, 10, "program"),
        (10, 20, "call"),
        (20, 30, "header"),
        (30, 90, "call"),
        (90, 100, "program"),
    ]


def test_the_time_of_a_stamp_is_its_own(stages, span):
    spans = [span("program", 0, 100), span("call", 10, 20), span("call", 22, 99)]
    found = stages.exclusive(spans, cost_ns=5)
    assert found == [
        (0, 10, "program"),
        (10, 20, "call"),
        (20, 22, "stamps"),
        (22, 99, "call"),
        (99, 100, "stamps"),
    ]


def test_spans_that_lie_apart_leave_a_gap(stages, span):
    found = stages.exclusive([span("request", 50, 60), span("request", 10, 20)], cost_ns=5)
    assert found == [(10, 20, "request"), (50, 60, "request")]


def test_a_queued_message_is_handed_until_its_handler_begins(stages):
    apart = [(0, 10, "message queued"), (15, 20, "request")]
    assert stages.handed([stages.Piece(*one) for one in apart]) == [
        (0, 10, "message queued"),
        (10, 15, stages.HANDED),
        (15, 20, "request"),
    ]
    within = [(0, 10, "message queued"), (10, 12, stages.STAMPS), (12, 20, stages.WAITING)]
    assert stages.handed([stages.Piece(*one) for one in within])[-1] == (12, 20, stages.HANDED)
    taken = [(0, 10, "message taken up"), (10, 20, stages.WAITING)]
    assert stages.handed([stages.Piece(*one) for one in taken])[-1] == (10, 20, stages.WAITING)


def test_a_wait_is_the_other_workers_time_or_the_messages(stages):
    own = [(0, 10, "call"), (10, 50, stages.WAITING), (50, 60, "call"), (60, 70, stages.WAITING)]
    other = [(5, 12, "request"), (20, 30, "request"), (25, 28, "header"), (45, 65, "header")]
    found = stages.overlaid(
        [stages.Piece(*one) for one in own], [stages.Piece(*one) for one in other]
    )
    assert found == [
        (0, (0, 10, "call")),
        (1, (10, 12, "request")),
        (0, (12, 20, stages.UNDER_WAY)),
        (1, (20, 30, "request")),
        (0, (30, 45, stages.UNDER_WAY)),
        (1, (45, 50, "header")),
        (0, (50, 60, "call")),
        (1, (60, 65, "header")),
        (0, (65, 70, stages.UNDER_WAY)),
    ]


def test_the_stages_of_a_step_add_up_to_it(stages, span):
    own = []
    other = []
    for start in (1_000_000, 2_000_000):
        own += [
            span("program", start, start + 900_000),
            span("phase forward", start + 100_000, start + 400_000),
            span("waiting", start + 150_000, start + 300_000),
            span("phase backward", start + 500_000, start + 800_000),
            span("waiting", start + 510_000, start + 790_000),
        ]
        other += [
            span("request", start + 200_000, start + 250_000, thread=2),
            span("gradient's task", start + 600_000, start + 700_000, thread=3),
        ]
    # A call before the steps, and a wait of another thread.
    own += [span("call", 0, 500_000), span("waiting", 0, 9_000_000, thread=7)]
    times, counts = stages.steps_of(own, other, cost_ns=1_000)
    assert [sum(step.values()) for step in times] == [900.0, 900.0]
    first = times[0]
    assert first["forward", 1, "request"] == 50.0
    assert first["forward", 0, stages.UNDER_WAY] == 100.0
    assert first["backward", 1, "gradient's task"] == 100.0
    assert first["context", 0, "program"] == 300.0
    assert counts["forward", 1, "request"] == counts["context", 0, "program"] == 2
