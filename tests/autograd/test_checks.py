"""Malformed messages: each is refused with a reason, causes no message, and fails only its pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpidist.autograd import checks
from mpidist.autograd.context import SMART, Context
from mpidist.autograd.control_messages import Notice
from mpidist.autograd.initiator import SmartStart
from mpidist.autograd.parts import plan_of
from mpidist.autograd.passes import Pass
from mpidist.autograd.recording import Send
from mpidist.errors import FrameError
from mpidist.rpc import current
from mpidist.rpc.message import Kind
from tests.autograd.hostile import (
    ME,
    MESSAGE,
    NOBODYS,
    OWN,
    PEER,
    PEERS,
    STRANGER,
    WORKERS,
    Outbox,
    agent,
    give,
    make_engine,
    notice,
    right,
    running,
)

LONG = 1 << 70
TYPES = [None, True, 1.5, "1", b"1", [1], (1,), {1: 1}, {1}, torch.ones(1), -1, LONG, 0]


@pytest.fixture
def outbox(monkeypatch):
    made = Outbox()
    monkeypatch.setattr(current, "agent", agent(made))
    return made


@pytest.fixture
def engine(outbox):
    return make_engine()


@pytest.mark.parametrize(
    "content",
    [*TYPES, (), (1,), (True, OWN), (99, OWN), (-1, OWN, 1), ("1", OWN), ([], OWN), (9, [])],
)
def test_notices_with_malformed_fields_are_refused(engine, outbox, content):
    with pytest.raises(FrameError):
        engine.handle_one_way(PEER, Kind.AUTOGRAD_NOTICE, 0, content)
    assert outbox.sent == [] and engine.contexts.find(OWN) is not None


@pytest.mark.parametrize("what", list(Notice))
@pytest.mark.parametrize("number", [*TYPES, NOBODYS])
def test_notices_of_impossible_contexts_and_passes_are_refused(engine, outbox, what, number):
    rest = {
        Notice.DONE: [()],
        Notice.FAILED: [("E", "E", "", None)],
        Notice.SUMMARY: [{}, ()],
        Notice.AWAIT: [True, ()],
        Notice.REPORT: [0.0, [], ()],
    }
    for numbers in [(number, ME << 48 | SMART | 1), (OWN, number)]:
        if numbers[0] == OWN and what in (Notice.CLEANUP, Notice.ADOPT):
            continue
        with pytest.raises(FrameError):
            notice(engine, PEER, what, *numbers, *rest.get(what, []))
    assert outbox.sent == [] and engine.contexts.find(OWN) is not None


@pytest.mark.parametrize(
    ("what", "source", "context", "key"),
    [
        (Notice.DONE, PEER, OWN, PEER << 48 | 1),  # not of this worker's passes
        (Notice.FAILED, PEER, OWN, PEER << 48 | 1),
        (Notice.SUMMARY, PEER, OWN, PEER << 48 | SMART | 1),
        (Notice.REPORT, PEER, OWN, PEER << 48 | 1),
        (Notice.ASK, STRANGER, OWN, PEER << 48 | SMART | 1),  # not by the worker that began it
        (Notice.AWAIT, STRANGER, OWN, PEER << 48 | SMART | 1),
        (Notice.PROBE, STRANGER, OWN, PEER << 48 | 1),
        (Notice.ASK, PEER, OWN, PEER << 48 | 1),  # in FAST mode
        (Notice.AWAIT, PEER, OWN, PEER << 48 | 1),
        (Notice.STOP, STRANGER, OWN, PEER << 48 | 1),
        (Notice.CLEANUP, PEER, OWN, None),  # of this worker's own context
        (Notice.CLEANUP, STRANGER, PEERS, None),
        (Notice.ADOPT, STRANGER, PEERS, None),  # of another's
    ],
)
def test_notices_from_unrelated_workers_are_refused(engine, outbox, what, source, context, key):
    known = engine.contexts._contexts[PEERS] = Context(PEERS)
    known.callers.add(PEER)
    rest = {
        Notice.DONE: [()],
        Notice.FAILED: [("E", "E", "", None)],
        Notice.SUMMARY: [{}, ()],
        Notice.AWAIT: [True, ()],
    }
    rest[Notice.REPORT] = [0.0, [], ()]
    numbers = [context] if key is None else [context, key]
    with pytest.raises(FrameError, match=r"has no say|not of SMART mode"):
        notice(engine, source, what, *numbers, *rest.get(what, []))
    assert outbox.sent == [] and len(engine.contexts) == 2
    assert not engine.contexts.find(OWN).stopped and not known.callees


def test_the_owner_and_the_callers_of_a_context_may_end_it(engine, outbox):
    for source in (PEER, STRANGER):  # whose context it is, and who has called within it
        known = engine.contexts._contexts[PEERS] = Context(PEERS)
        known.callers.add(STRANGER)
        notice(engine, source, Notice.CLEANUP, PEERS)
        assert engine.contexts.find(PEERS) is None


@pytest.mark.parametrize("rest", [[*TYPES, (0, LONG), (-1,), (WORKERS,), (True,), ("0",), ([],)]])
def test_ranks_of_workers_that_are_none(engine, outbox, rest):
    for ranks in rest:
        if ranks == (1,):
            continue
        for what, fields in [(Notice.DONE, [ranks]), (Notice.REPORT, [1.0, [], ranks])]:
            under_way, other = running(engine), Pass(99, OWN, ME)
            engine.initiator._passes[99] = other
            with pytest.raises(FrameError, match="field of another form"):
                notice(engine, PEER, what, OWN, under_way.key, *fields)
            assert f"rank {PEER} sent {what.name}" in str(under_way.error) and other.error is None
            assert under_way.mentioned == {ME, PEER}
    assert outbox.sent == []


@pytest.mark.parametrize(
    "fields",
    [
        [float("nan"), [], ()],
        [-1.0, [], ()],
        ["1", [], ()],
        [1.0, "text", ()],
        [1.0, [1], ()],
        [1.0, [b"text"], ()],
        [1.0, None, ()],
    ],
)
def test_a_report_of_another_form(engine, fields):
    under_way = running(engine)
    with pytest.raises(FrameError):
        notice(engine, PEER, Notice.REPORT, OWN, under_way.key, *fields)
    assert under_way.error is not None and not under_way._reports


def test_a_report_of_a_worker_without_a_part(engine):
    under_way = running(engine)
    with pytest.raises(FrameError, match="has no part"):
        notice(engine, STRANGER, Notice.REPORT, OWN, under_way.key, float("inf"), ["nothing"], ())
    assert under_way.error is None and not under_way._reports


def test_what_is_said_of_a_pass_of_another_context(engine):
    under_way = running(engine)
    engine.contexts._contexts[PEERS] = Context(PEERS)
    for what, fields in [
        (Notice.DONE, [(STRANGER,)]),
        (Notice.FAILED, [("E", "E", "", None)]),
        (Notice.REPORT, [1.0, [], ()]),
    ]:
        with pytest.raises(FrameError, match="not of context"):
            notice(engine, PEER, what, PEERS, under_way.key, *fields)
    assert under_way.error is None and under_way.mentioned == {ME, PEER}


@pytest.mark.parametrize(
    "description", [*TYPES, ("E",), (1, 2, 3, 4), ("E", "E", "", b"\x80"), ("E", "E", "", [])]
)
def test_a_failure_that_cannot_be_read_ends_its_pass(engine, description):
    under_way = running(engine)
    notice(engine, PEER, Notice.FAILED, OWN, under_way.key, description)
    assert isinstance(under_way.error, RuntimeError)
    assert str(under_way.error).startswith(f"Error on Node {PEER}: ")


class TestSurveys:
    @pytest.fixture
    def under_way(self, engine):
        made = running(engine, SMART)
        context = engine.contexts.find(OWN)
        start = SmartStart(engine.initiator.parts, made, context, False, plan_of(context, []), [])
        engine.initiator._surveying[made.key] = start
        start._begin_everywhere = lambda: self.begun.append(made)
        self.begun = []
        assert made.survey.next() == {PEER}
        return made

    @pytest.mark.parametrize(
        "fields",
        [
            *[[wrong, ()] for wrong in TYPES if wrong != {1: 1}],
            [{1: 1}, ()],
            [{"1": []}, ()],
            [{0: []}, ()],
            [{LONG: []}, ()],
            [{1: ((1, 0),)}, (0,)],
            [{1: [(1,)]}, ()],
            [{1: [(1, 0, 0)]}, (0,)],
            [{1: [[1, 0]]}, (0,)],
            [{1: [(1, WORKERS)]}, (0,)],
            [{1: [(1, -1)]}, (0,)],
            [{1: [(0, 0)]}, (0,)],
            [{1: [("1", 0)]}, (0,)],
            [{}, [0]],
            [{}, (WORKERS,)],
            [{}, ("0",)],
        ],
    )
    def test_an_answer_of_another_form_ends_its_pass(self, engine, under_way, outbox, fields):
        with pytest.raises(FrameError):
            notice(engine, PEER, Notice.SUMMARY, OWN, under_way.key, *fields)
        assert "rank 1 sent SUMMARY" in str(under_way.error)
        assert not self.begun and not outbox.sent and PEER not in under_way.survey.summaries

    def test_hops_to_workers_that_do_not_share_the_context(self, engine, under_way, outbox):
        notice(engine, PEER, Notice.SUMMARY, OWN, under_way.key, {5: [(6, STRANGER)]}, (ME,))
        assert "rank 1 has tensors of ranks [2], which are none of its peers" in str(
            under_way.error
        )
        assert not self.begun and not outbox.sent

    def test_answers_of_workers_that_were_not_asked(self, engine, under_way, outbox):
        with pytest.raises(FrameError, match="not asked for"):
            notice(engine, STRANGER, Notice.SUMMARY, OWN, under_way.key, {}, ())
        assert under_way.error is None and not self.begun
        notice(engine, PEER, Notice.SUMMARY, OWN, under_way.key, {}, (ME,))
        assert self.begun == [under_way]
        with pytest.raises(FrameError, match="or again"):
            notice(engine, PEER, Notice.SUMMARY, OWN, under_way.key, {5: []}, (ME,))
        assert under_way.error is None and under_way.survey.summaries[PEER] == {}

    def test_an_answer_in_a_pass_of_fast_mode(self, engine):
        under_way = running(engine, SMART)
        with pytest.raises(FrameError, match="not asked for"):
            notice(engine, PEER, Notice.SUMMARY, OWN, under_way.key, {}, ())


class TestAwaited:
    KEY = PEER << 48 | SMART | 5

    def failures(self, outbox):
        """Return the error texts of the FAILED notices to the initiator."""
        assert all(
            to == PEER and content[0] == Notice.FAILED and content[2] == self.KEY
            for to, content in outbox.sent
        )
        return [content[3][1] for _, content in outbox.sent]

    @pytest.mark.parametrize(
        "fields",
        [
            *[[wrong, ()] for wrong in TYPES if wrong is not True],
            *[[True, wrong] for wrong in TYPES if wrong != (1,)],
        ],
    )
    def test_fields_of_another_form(self, engine, outbox, fields):
        notice(engine, PEER, Notice.ASK, OWN, self.KEY)
        outbox.sent.clear()
        with pytest.raises(FrameError):
            notice(engine, PEER, Notice.AWAIT, OWN, self.KEY, *fields)
        assert "rank 1 sent AWAIT with a field of another form" in self.failures(outbox)[0]
        assert not engine.contexts.find(OWN).parts

    @pytest.mark.parametrize("awaited", [(5,), (MESSAGE, 5), tuple(range(1, 100_000))])
    def test_messages_that_were_not_sent(self, engine, outbox, awaited):
        notice(engine, PEER, Notice.ASK, OWN, self.KEY)
        outbox.sent.clear()
        notice(engine, PEER, Notice.AWAIT, OWN, self.KEY, True, awaited)
        assert (
            "awaits gradients of messages that this worker has not sent" in self.failures(outbox)[0]
        )
        assert not engine.contexts.find(OWN).parts

    def test_a_message_twice_counts_once(self, engine, outbox):
        notice(engine, PEER, Notice.ASK, OWN, self.KEY)
        notice(engine, PEER, Notice.AWAIT, OWN, self.KEY, True, (MESSAGE, MESSAGE))
        outbox.sent.clear()
        give(engine, PEER, right(), key=self.KEY)
        assert [content[0] for _, content in outbox.sent] == [Notice.DONE]

    def test_a_pass_that_has_not_asked(self, engine, outbox):
        notice(engine, PEER, Notice.AWAIT, OWN, self.KEY, True, (MESSAGE,))
        assert "has not asked which there are" in self.failures(outbox)[0]

    def test_questions_without_end_do_not_fill_the_memory(self, engine, outbox):
        for count in range(1000):
            notice(engine, PEER, Notice.ASK, OWN, self.KEY + count)
        assert len(engine.contexts.find(OWN).plans) <= 64
        assert "passes have asked context" in outbox.sent[-1][1][3][1]


class TestGradients:
    KEY = PEER << 48 | 33

    def refused(self, engine, outbox, content, match, source=PEER, message=MESSAGE):
        with pytest.raises(FrameError, match=match):
            give(engine, source, content, message=message)
        context = engine.contexts.find(OWN)
        assert not context.parts and not context.gradients.all()
        return [(to, content[0], content[2]) for to, content in outbox.sent]

    def test_right_ones_are_taken(self, engine, outbox):
        give(engine, PEER, right())
        context = engine.contexts.find(OWN)
        assert context.gradients.all()[context.leaf].tolist() == [[3.0] * 3] * 2
        assert outbox.sent == [(PEER, (Notice.DONE, OWN, self.KEY, ()))]

    @pytest.mark.parametrize(
        ("place", "wrong"),
        [
            (0, torch.ones(2, 4)),
            (0, torch.ones(5, 2, 3)),  # torch would sum dimension 0
            (0, torch.ones(1, 3)),
            (0, torch.ones(())),
            (0, torch.ones(2, 3, dtype=torch.complex64)),  # torch would drop the imaginary part
            (0, torch.ones(2, 3, dtype=torch.float64)),
            (0, torch.ones(2, 3, dtype=torch.int64)),
            (0, torch.ones(2, 3, device="meta")),
            (1, torch.ones(7, dtype=torch.float64)),
            (0, "text"),
            (0, 1.0),
            (0, [torch.ones(2, 3)]),
            (1, (None,)),
            (1, {"a": 1}),
        ],
    )
    def test_others_than_those_of_the_tensors_that_were_sent(self, engine, outbox, place, wrong):
        content = right()
        content[place] = wrong
        posted = self.refused(engine, outbox, content, rf"(gradient|tensor) {place} ")
        assert posted == [(PEER, Notice.FAILED, self.KEY)]

    @pytest.mark.parametrize(
        "content",
        [[], right()[:1], [*right(), None], torch.ones(2, 3), None, "text", 5, (1, 2), {1: 2}],
    )
    def test_another_number(self, engine, outbox, content):
        assert self.refused(engine, outbox, content, "which has 2 tensors") == [
            (PEER, Notice.FAILED, self.KEY)
        ]

    def test_of_a_message_that_was_not_sent(self, engine, outbox):
        posted = self.refused(
            engine, outbox, right(), "which this worker has not sent to it", message=12
        )
        assert posted == [(PEER, Notice.FAILED, self.KEY)]

    def test_of_another_worker_that_shares_the_context(self, engine, outbox):
        engine.contexts.find(OWN).callees.add(STRANGER)
        posted = self.refused(
            engine, outbox, right(), "which this worker has not sent to it", source=STRANGER
        )
        assert posted == [(PEER, Notice.FAILED, self.KEY)]

    def test_of_a_worker_that_does_not_share_the_context(self, engine, outbox):
        assert self.refused(engine, outbox, right(), "does not share", source=STRANGER) == []
        give(engine, PEER, right())
        assert outbox.sent[-1][1][0] == Notice.DONE

    @pytest.mark.parametrize(
        ("context", "key"),
        [(NOBODYS, PEER << 48 | 1), (OWN, NOBODYS), (OWN, 0), (0, 0), (5, NOBODYS)],
    )
    def test_of_contexts_and_passes_that_no_worker_makes(self, engine, outbox, context, key):
        with pytest.raises(FrameError, match="of this job"):
            give(engine, PEER, right(), context, key)
        assert outbox.sent == []

    def test_a_second_time(self, engine, outbox):
        """A repeated message is refused while the part waits for others, and after its end."""
        context = engine.contexts.find(OWN)
        give(engine, PEER, right())
        with pytest.raises(FrameError, match="part here is over"):
            give(engine, PEER, right())
        assert context.gradients.all()[context.leaf].tolist() == [[3.0] * 3] * 2
        context.sends[12] = Send(PEER, False, [context.leaf * 5])
        give(engine, PEER, right(), key=self.KEY + 1)
        give(engine, PEER, right(), key=self.KEY + 1)
        assert "have come before in this pass" in outbox.sent[-1][1][3][1] and not context.parts

    def test_with_a_graph_of_their_own(self, engine):
        context = engine.contexts.find(OWN)
        content = [torch.ones(2, 3, requires_grad=True) * 1, None]
        give(engine, PEER, content)
        assert not context.gradients.all()[context.leaf].requires_grad


class TestPassesFromReferences:
    @pytest.mark.parametrize(
        "content", [*TYPES, (), (1, 2, 3, 4), (None, OWN, True, "fast"), ("ref", OWN, True, "fast")]
    )
    def test_requests_of_another_form(self, engine, content):
        with pytest.raises(FrameError, match=r"backward\(\) of a reference"):
            engine.handle(PEER, Kind.BACKWARD_AUTOGRAD, 0, content)

    def test_an_object_with_a_method_of_that_name(self, engine):
        called = []
        fake = SimpleNamespace(backward=lambda *args: called.append(args), is_owner=lambda: True)
        with pytest.raises(FrameError):
            engine.handle(PEER, Kind.BACKWARD_AUTOGRAD, 0, (fake, OWN, True, "fast"))
        assert not called


def test_requests_within_contexts_that_no_worker_makes(engine):
    with pytest.raises(FrameError, match="no worker can have made"):
        engine.request_arrived(NOBODYS, PEER)
    assert len(engine.contexts) == 1


def test_notices_of_the_engine_itself_have_the_form():
    """The checks accept every notice that a real pass sends."""
    key = ME << 48 | SMART | 1
    for what, rest in [
        (Notice.DONE, [(1, 2)]),
        (Notice.SUMMARY, [{5: [(6, 1)], 7: []}, (0, 1)]),
        (Notice.AWAIT, [False, (5, 6)]),
        (Notice.REPORT, [float("inf"), ["arguments"], ()]),
    ]:
        found, context, of, fields = checks.head((int(what), OWN, key, *rest), WORKERS)
        checks.body(found, fields, WORKERS)
        assert (found, context, of) == (what, OWN, key)
