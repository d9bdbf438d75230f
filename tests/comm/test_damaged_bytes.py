"""Eager messages, sections and headers of any bytes: refused by FrameError, or no more comes out than has arrived."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bytes_fuzz import messages

CASES = int(os.environ.get("MPIDIST_FUZZ_CASES", "600"))
READERS = {
    "eager": (messages.eager_samples(), messages.check_eager),
    "section": (messages.section_samples(), messages.check_section),
    "header": (messages.header_samples(), messages.check_header),
}


@pytest.mark.parametrize("name", READERS)
def test_valid_ones_are_taken(name):
    samples, check = READERS[name]
    assert all(map(check, samples))


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_refused_or_bounded(name):
    samples, check = READERS[name]
    settings(max_examples=CASES, deadline=None)(given(messages.damaged(samples))(check_of(check)))()


def check_of(check):
    def test(case):
        check(case)

    return test


@settings(max_examples=CASES, deadline=None)
@given(messages.damaged(messages.section_samples()), st.lists(st.integers(0, 50), max_size=3).map(tuple))
def test_sections_beside_payloads(case, payloads):
    messages.check_section(case, payloads)
