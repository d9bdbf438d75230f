"""Eager messages, sections and headers of random bytes: a FrameError, or no more than arrived."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bytes_fuzz import sections

CASES = int(os.environ.get("MPIDIST_FUZZ_CASES", "250"))
READERS = {
    "eager": (sections.eager_samples(), sections.check_eager),
    "section": (sections.section_samples(), sections.check_section),
    "header": (sections.header_samples(), sections.check_header),
}


@pytest.mark.parametrize("name", READERS)
def test_valid_bytes_are_read(name):
    samples, check = READERS[name]
    assert all(map(check, samples))


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_refused_or_bounded(name):
    samples, check = READERS[name]
    settings(max_examples=CASES, deadline=None)(given(sections.damaged(samples))(check_of(check)))()


def check_of(check):
    def test(case):
        check(case)

    return test


@settings(max_examples=CASES, deadline=None)
@given(
    sections.damaged(sections.section_samples()),
    st.lists(st.integers(0, 50), max_size=3).map(tuple),
)
def test_any_section_with_any_payloads_is_refused_or_bounded(case, payloads):
    sections.check_section(case, payloads)
