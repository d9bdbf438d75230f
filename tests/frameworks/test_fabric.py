"""Lightning Fabric with its own strategies under MPIDIST_REPLACE, and with mpidist's."""

from __future__ import annotations

import pytest

from tests.frameworks.jobs import CLOSE, OUR_DDP, each_class_of_theirs, ranks_of, require

# test_lightning runs the same launchers, strategies and hooks of Lightning's through its Trainer.
pytestmark = pytest.mark.long


@each_class_of_theirs
def test_training_equals_that_of_one_process(tmp_path, words, module):
    require("lightning")
    for facts in ranks_of("with_fabric", words, str(tmp_path)):
        for name, wrapped in (
            ("named", module),
            ("ours", OUR_DDP),
            ("sharded", "torch.distributed.fsdp"),
        ):
            course = facts[name]
            assert course["wrapped"].startswith(wrapped), facts
            assert max(abs(course[what]) for what in ("trained", "loss", "resumed")) < CLOSE, (
                name,
                facts,
            )
            assert course["epoch"] == 1
        assert max(facts["accumulated"]) < CLOSE, facts
        full_rank, rank_1 = facts["hooks"]
        assert full_rank < 1e-4 < rank_1, facts
        assert "write devices=2, num_nodes=1, or start 3 with mpirun or srun" in facts["wrong"], (
            facts
        )
        assert "a module that fabric.setup() has returned; got Sequential" in facts["unwrapped"], (
            facts
        )
