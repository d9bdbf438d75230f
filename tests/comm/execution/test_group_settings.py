"""Settings of a group: what stands if it is not given, and that nobody changes it."""

import dataclasses

import pytest

from mpidist.comm.execution.group_settings import ABORT, RAISE, GroupSettings


def test_a_timeout_ends_the_job_and_ranks_are_not_compared_unless_it_is_said():
    settings = GroupSettings("name", "key", (3, 1), 5.0)
    assert (settings.debug, settings.on_timeout) == (None, ABORT) and (ABORT, RAISE) == (
        "abort",
        "raise",
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.name = "other"
    other = dataclasses.replace(settings, on_timeout=RAISE)
    assert other.world_ranks == (3, 1) and other != settings
