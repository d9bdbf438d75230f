"""Accelerate, transformers' Trainer and Lightning with two ranks on one device."""

from __future__ import annotations

import pytest

from tests.frameworks.jobs import CLOSE, ranks_of, require

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "kind",
    [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_ranks_with_local_rank_0_train_together_on_one_device(tmp_path, kind):
    for library in ("accelerate", "lightning", "transformers"):
        require(library)
    by_rank = ranks_of("on_one_device", "gloo,nccl,mpi,ddp", kind, str(tmp_path), LOCAL_RANK="0")
    for rank, facts in enumerate(by_rank):
        for name in ("accelerate", "trainer", "lightning"):
            found = facts[name]
            assert found["rank"] == rank and abs(found["far"]) < 10 * CLOSE, (name, found)
            assert found["device"] in (kind, f"{kind}:0"), (name, found)
