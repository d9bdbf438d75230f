"""Settings in seconds."""

import re

import pytest

from mpidist.comm.watchdog.seconds_setting import seconds


def test_a_number_from_0_on_or_the_default():
    for text, value in (("", 7.0), (" ", 7.0), ("0", 0.0), (" 1e2 ", 100.0)):
        assert seconds({"V": text}, "V", 7.0, "") == value
    assert seconds({}, "V", 7.0, "") == 7.0
    for text in ("-1", "ten", "inf", "nan"):
        problem = f"V needs a number of seconds, 0 or more; got '{text}'"
        with pytest.raises(ValueError, match=re.escape(problem)):
            seconds({"V": text}, "V", 7.0, "0 or more")
