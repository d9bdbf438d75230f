"""Lightning's Trainer with its own strategies under MPIDIST_REPLACE, and with mpidist's."""

from __future__ import annotations

import pytest

from tests.frameworks.jobs import CLOSE, OUR_DDP, each_class_of_theirs, ranks_of, require
from tests.tools.support import launcher, python, started

pytestmark = pytest.mark.slow


@each_class_of_theirs
def test_training_equals_that_of_one_process(tmp_path, words, module):
    require("lightning")
    for rank, facts in enumerate(ranks_of("with_lightning", words, str(tmp_path))):
        for name, wrapped in (
            ("named", module),
            ("ours", OUR_DDP),
            ("sharded", "tests.frameworks.with_lightning"),
        ):
            course = facts[name]
            assert course["wrapped"] in (wrapped, "__main__"), facts
            assert max(abs(course[what]) for what in ("trained", "loss", "resumed")) < CLOSE, (
                name,
                facts,
            )
        assert max(*facts["by_hand"].values(), facts["accumulated"]) < CLOSE, facts
        hooks = facts["hooks"]
        assert hooks["full_rank"] < 1e-4 < hooks["rank_1"] and CLOSE < hooks["wrapped"] < 1e-2, (
            hooks
        )
        assert hooks["theirs"] < CLOSE, hooks
        assert facts["environment"] == [rank, rank, 0, True] and facts["sharing"] == 0, facts
        wrong = facts["wrong"]
        assert "process_group_backend='gloo'. Leave it out" in wrong["backend"]
        assert "leave start_method='fork' out" in wrong["start"]
        assert "write devices=2, num_nodes=1, or start 3 with mpirun or srun" in wrong["devices"], (
            wrong
        )


@pytest.mark.long
@pytest.mark.parametrize("words", ["gloo", "gloo,ddp"])
def test_a_job_of_lightnings_own_strategy_ends_by_itself(tmp_path, words):
    require("lightning")
    program = [*python(), "-m", "tests.frameworks.lightning_alone", str(tmp_path)]
    done = started([*launcher(2), *program], 150, {"MPIDIST_REPLACE": words})
    assert done.returncode == 0, done.stderr
    ends = sorted(line for line in done.stdout.splitlines() if line.startswith("ended as"))
    assert ends == ["ended as 0 of 2", "ended as 1 of 2"]
