"""Job of ``make gpu``: what a step's processes did becomes one line."""

import os

from tests.gpu.job import SKIPPED, Job
from tests.gpu.machine import Machine
from tests.gpu.plan import CUT_SHORT, FAILED, OK, TESTS, TIMED_OUT
from tests.gpu.steps import Step


def job_of(tmp_path, source, limit_s=60.0):
    step = Step("aware:comm/a", TESTS, 60, (), ("bash", "-c", source), {"OWN": "1"})
    return Job(step, Machine(tmp_path, dict(os.environ), {}), limit_s)


def outcome_of(job):
    outcome = None
    while outcome is None:
        outcome = job.ended()
    return outcome


def test_the_last_words_and_the_failures_are_told(tmp_path):
    good = outcome_of(job_of(tmp_path, "echo '== 3 passed in 1s =='; echo end"))
    assert (good.outcome, good.words, good.failures) == (OK, "status 0  3 passed in 1s", ())
    bad = outcome_of(job_of(tmp_path, "for i in 2 1 1; do echo call failed in t$i; done; exit 1"))
    assert bad.outcome == FAILED and bad.failures == ("call failed in t1", "call failed in t2")
    assert outcome_of(job_of(tmp_path, "exit 77")).outcome == SKIPPED
    assert outcome_of(job_of(tmp_path, "tail -f /dev/null", limit_s=1.0)).outcome == TIMED_OUT


def test_a_test_that_hangs_hides_none_behind_it(tmp_path):
    source = """
        echo "without $(cat $MPIDIST_TESTS_DONE)"
        if [ -s $MPIDIST_TESTS_DONE ]; then echo second >>$MPIDIST_TESTS_BEGUN
        else echo first >>$MPIDIST_TESTS_BEGUN; echo 'Timeout (0:00:45)!'; exit 1; fi
    """
    job = job_of(tmp_path, source)
    outcome = outcome_of(job)
    assert outcome.outcome == FAILED and outcome.failures == ("ended in first",)
    assert job.log.read_text().splitlines() == ["without ", "Timeout (0:00:45)!", "without first"]


def test_a_job_that_is_cut_short_keeps_its_log(tmp_path):
    job = job_of(tmp_path, "echo 1 passed; exec tail -f /dev/null")
    try:
        assert job.cut_short().outcome == CUT_SHORT
    finally:
        job.process.terminate()
        job.process.wait()
