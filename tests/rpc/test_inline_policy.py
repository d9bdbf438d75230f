"""Inline policy: running times decide where a request runs."""

from mpidist.rpc import inline_policy
from mpidist.rpc.inline_policy import InlinePolicy


def test_running_times_are_learnt_and_forgotten_slowly():
    policy = InlinePolicy()
    assert not policy.is_quick("f")
    policy.record("f", 1e-5)
    assert policy.is_quick("f") and not policy.is_quick("g")
    policy.record("f", 1.0)
    turns = 0
    while not policy.is_quick("f"):
        policy.record("f", 1e-5)
        turns += 1
    assert 10 < turns < 60


def test_it_keeps_a_limited_number_of_names(monkeypatch):
    monkeypatch.setattr(inline_policy, "_MAX_KEYS", 10)
    policy = InlinePolicy()
    for number in range(100):
        policy.record(number, 1e-5)
        assert policy.is_quick(number) and len(policy._seconds) <= 10
