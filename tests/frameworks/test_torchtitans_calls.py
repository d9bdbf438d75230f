"""torchtitan's calls of torch.distributed under MPIDIST_REPLACE.

torchtitan itself trains on GPUs alone.
"""

from __future__ import annotations

import pytest

from tests.frameworks.jobs import CLOSE, OURS, ranks_of

pytestmark = pytest.mark.slow


def test_they_shard_train_and_save_while_training_goes_on(tmp_path):
    first, second = ranks_of("with_torchtitans_calls", "gloo,nccl,mpi", str(tmp_path))
    # The world, which is the mesh, and the group for checkpoints.
    assert first["groups"] == [OURS] * 2
    assert first["norms"] == second["norms"] and first["means"] == second["means"]
    assert len(set(first["means"])) == 1
    for facts in (first, second):
        assert max(facts[what] for what in ("trained", "in_thread", "in_process")) < CLOSE, facts
