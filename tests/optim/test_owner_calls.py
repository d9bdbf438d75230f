"""Concurrent calls of several workers, and their errors."""

from __future__ import annotations

import pytest

import mpidist.rpc as rpc
from mpidist.errors import WorkerErrors
from mpidist.optim.owner_calls import call_all
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)


def half(number):
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def test_results_by_worker(group, workers):
    infos = [rpc.get_worker_info(name) for name in workers]
    found = call_all("halving", half, {info: (2 * info.id,) for info in infos})
    agree(group, found == {info: info.id for info in infos}, f"{found}")


def test_all_errors_in_one(group, workers):
    infos = [rpc.get_worker_info(name) for name in workers]
    errors = None
    try:
        call_all("halving", half, {info: (info.id + 1,) for info in infos})
    except WorkerErrors as error:
        errors = error
    odd = {name: str(rank + 1) for rank, name in enumerate(workers) if rank % 2 == 0}
    agree(
        group,
        errors is not None
        and set(errors.errors) == set(odd)
        and all(
            f"{name} (rank {int(number) - 1}): ValueError: {number} is odd" in str(errors)
            for name, number in odd.items()
        )
        and f"halving failed on {len(odd)} of {group.size}" in str(errors)
        and isinstance(errors.__cause__, ValueError),
        f"{errors!r}",
    )
