"""Settings are checked when they are made."""

import math

import pytest
import torch

from mpidist.ddp.buckets.settings import Settings, require_int, require_real


@pytest.mark.parametrize("value", [True, 1.5, "1", None, torch.tensor(1)])
def test_an_int_is_required(value):
    with pytest.raises(TypeError, match="rank must be an int"):
        require_int("rank", value)


def test_an_int_may_have_a_lowest_value():
    require_int("rank", 1, least=1)
    require_int("rank", -1)
    with pytest.raises(ValueError, match="rank must be at least 1; got 0"):
        require_int("rank", 0, least=1)
    with pytest.raises(ValueError, match="step must not be negative; got -1"):
        require_int("step", -1, least=0)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (False, TypeError, "must be a number"),
        ("1", TypeError, "must be a number"),
        (-0.5, ValueError, "must not be negative"),
        (math.inf, ValueError, "must be finite"),
        (math.nan, ValueError, "must be finite"),
    ],
)
def test_a_real_number_is_required(value, kind, words):
    require_real("rate", 0.5)
    with pytest.raises(kind, match=f"rate {words}"):
        require_real("rate", value)


@pytest.mark.parametrize(("most", "kind"), [(0, ValueError), (2.0, TypeError)])
def test_the_number_of_buckets_is_a_positive_int(most, kind):
    assert Settings((40,), most_buckets=2).most_buckets == 2
    with pytest.raises(kind, match="the number of buckets"):
        Settings((40,), most_buckets=most)
