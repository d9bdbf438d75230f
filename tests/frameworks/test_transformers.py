"""transformers' Trainer under MPIDIST_REPLACE, with torch's DDP and with mpidist's."""

from __future__ import annotations

import pytest

from tests.frameworks.jobs import CLOSE, ranks_of, require

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("gloo,nccl,mpi,ddp", "mpidist.ddp.module"),
        pytest.param("gloo,nccl,mpi", "torch.nn.parallel.distributed", marks=pytest.mark.long),
    ],
)
def test_training_equals_that_of_one_process(tmp_path, words, module):
    require("transformers")
    require("accelerate")
    for facts in ranks_of("with_transformers", words, str(tmp_path)):
        assert facts["wrapped"] == module and facts["mode"] == "distributed" and facts["ranks"] == 2
        for what in ("trained", "loss", "logits", "resumed", "named"):
            assert abs(facts[what]) < 10 * CLOSE, (what, facts)
        assert facts["before"] == 0  # the checkpoint changes the weights
        # mpidist's class here.
        assert "mpidist is not available, please use gloo" in facts["wrong"], facts["wrong"]
