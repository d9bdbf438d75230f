"""Segments of the int8 wire by measurement: the sizes with a choice, and the fastest of each."""

from types import SimpleNamespace

import pytest
import torch

from mpidist.zero.wire import tuning
from mpidist.zero.wire.int8 import Int8Wire
from mpidist.zero.wire.tuning import SEGMENTS, measured_segments, segments_for
from tests.tools.support import agree

CPU = torch.device("cpu")


def test_segments_that_hold_a_shard_whole_are_measured_once():
    assert segments_for(1) == segments_for(SEGMENTS[0]) == SEGMENTS[:1]
    assert segments_for(SEGMENTS[0] + 1) == segments_for(SEGMENTS[1]) == SEGMENTS[:2]
    assert segments_for(SEGMENTS[-1] + 1) == SEGMENTS


@pytest.mark.mpi
def test_each_shard_with_a_choice_has_its_fastest_segment(group, monkeypatch):
    """A clock of the test's: one of the three segments is the fastest on the slowest rank."""
    monkeypatch.setattr(tuning, "SEGMENTS", (256, 512, 1024))
    shared, now, lines = [], [0.0], []
    share = Int8Wire.share

    def counted(wire, *args):
        shared.append(wire._segment_numel)
        # Rank 0 alone would choose 256, and the last rank 1024.
        late = {256: group.rank + 1.0, 512: 1.5, 1024: group.size - group.rank + 0.0}
        now[0] += late[wire._segment_numel]
        share(wire, *args)

    monkeypatch.setattr(Int8Wire, "share", counted)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    # Shards of 256, 300 (twice) and 4000 elements.
    sizes = [4 * group.size * numel for numel in (4000, 256, 300)] + [4 * group.size * 300]
    found = measured_segments(group, CPU, sizes, 2, lines.append)
    if group.size == 1:
        assert found == [] == shared == lines
        return
    agree(group, found == [(300, 512), (4000, 512)], str(found))
    agree(group, shared == [256, 512] * 3 + [256, 512, 1024] * 3, str(shared))
    agree(group, "shards of 300 elements  256: " in lines[0] and len(lines) == 2, str(lines))
