"""Accelerate under MPIDIST_REPLACE, with torch's DDP, with mpidist's DDP, and with FSDP2."""

from __future__ import annotations

import pytest

from tests.frameworks.jobs import CLOSE, ranks_of, require

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("gloo,nccl,mpi", "torch.nn.parallel.distributed"),
        ("gloo,nccl,mpi,ddp", "mpidist.ddp.module"),
    ],
)
def test_training_equals_that_of_one_process(tmp_path, words, module):
    require("accelerate")
    for facts in ranks_of("with_accelerate", words, str(tmp_path)):
        assert (
            facts["wrapped"] == module
            and facts["device"].startswith("cpu")
            and facts["backend"] == "mpi"
        )
        for what in ("trained", "loss", "resumed", "accumulated", "unused", "sharded", "triggered"):
            assert abs(facts[what]) < CLOSE, (what, facts)
        assert facts["before"] == 0  # load_state changes the weights
        assert ("our_hook" in facts) is module.startswith("mpidist") and facts.get(
            "our_hook", 0
        ) < 1e-4, facts
        assert facts["full_rank"] < 1e-4 < facts["rank_1"], facts
        # mpidist's class here.
        assert "mpidist is not available, please use gloo" in facts["wrong"], facts["wrong"]
