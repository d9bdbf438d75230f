"""Launch of a program of this folder as a job of two ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from mpidist.c10d import generation
from tests.tools.support import launcher, missing, printed, python, started

OURS = f"{generation.FOLDER}.process_group.TorchProcessGroup"
OUR_DDP, TORCHS_DDP = "mpidist.ddp.module", "torch.nn.parallel.distributed"
CLOSE = 1e-6  # float32, sums in another order


# Values of MPIDIST_REPLACE, and the module of the class with which Lightning's own strategies then
# wrap.
each_class_of_theirs = pytest.mark.parametrize(
    ("words", "module"),
    [
        ("gloo,nccl,mpi", TORCHS_DDP),
        pytest.param("gloo,nccl,mpi,ddp", OUR_DDP, marks=pytest.mark.long),
    ],
)


def require(library: str) -> None:
    """Skip, or fail in CI, if a library of the extra ``frameworks`` is missing."""
    if importlib.util.find_spec(library) is None:
        missing(f"{library} is not installed (pip install 'mpidist[frameworks]')")


def ranks_of(
    program: str, words: str | None, *arguments: str, **variables: str
) -> list[dict[str, Any]]:
    """Run ``tests.frameworks.<program>`` on two ranks; return their reports, all on mpidist.

    Args:
        words: ``MPIDIST_REPLACE``; None leaves it unset.
    """
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **variables}
    if words is not None:
        environment["MPIDIST_REPLACE"] = words
    command = [*launcher(2), *python(PYTHONWARNINGS="ignore"), "-m"]
    command += [f"tests.frameworks.{program}", *arguments]
    done = started(command, 180, environment)
    # The Trainer prints dicts as well.
    if done.returncode == 0:
        done.stdout = "\n".join(
            line for line in done.stdout.splitlines() if line.startswith('{"rank"')
        )
    by_rank = printed(done)
    assert sorted(by_rank) == [0, 1]
    for rank in by_rank.values():
        assert rank["groups"] and set(rank["groups"]) == {OURS}, rank["groups"]
    return [by_rank[0], by_rank[1]]
