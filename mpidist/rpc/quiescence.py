"""When all workers have come to the same point and nothing is under way between them any more.

Each worker waits until it has no call and no request under way, and reports its counts to rank 0. Once all have reported, rank 0
compares: are two rounds in a row the same, and are as many one-way messages taken as were sent, then nothing moved between the
rounds and nothing can move again (Mattern, "Algorithms for distributed termination detection", Distributed Computing 2 (1987),
§ 4: the four-counter method). Letters carry all of it, so a worker that gives up leaves no collective of MPI half done.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mpidist.comm import departures
from mpidist.errors import CommTimeout, RankFailureError
from mpidist.rpc.message import Content, Header, Kind

if TYPE_CHECKING:
    from mpidist.rpc.agent import Agent

_NAP_S = 2e-4
_COORDINATOR = 0
_PROCEED, _AGAIN = 1, 0


def note_report(agent: Agent, source: int, header: Header) -> None:
    """Take a worker's report, on rank 0; with the last one, tell all."""
    board = agent.board
    number, *counts = header.ids
    reports = board.reports.setdefault(number, {})
    reports[source] = tuple(counts)
    if len(reports) < len(agent.get_worker_infos()):
        return
    del board.reports[number]
    sums = tuple(map(sum, zip(*reports.values(), strict=True)))
    is_over = sums == board.last and sums[2] == sums[3]
    board.last = None if is_over else sums
    for worker in agent.get_worker_infos():
        agent.post(
            worker.id, Header(Kind.QUIET_VERDICT, agent.generation, 0, (number, _PROCEED if is_over else _AGAIN)), Content()
        )


def note_verdict(agent: Agent, source: int, header: Header) -> None:
    """Take rank 0's word."""
    number, verdict = header.ids
    agent.board.verdicts[number] = verdict
    agent.board.news.set()


def wait_for_quiet(agent: Agent, timeout_s: float) -> None:
    """Return when all workers have called this and nothing is under way.

    Collective: over all workers.

    Args:
        timeout_s: 0 for no end.

    Raises:
        CommTimeout: Not so in time; names who is missing, on rank 0.
        RankFailureError: A worker has left.
    """
    board = agent.board
    deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    while True:
        while agent.totals()[0]:
            _check(agent, deadline, "calls are under way on this worker")
            time.sleep(_NAP_S)
        number = board.round
        board.round += 1
        board.news.clear()
        agent.post(_COORDINATOR, Header(Kind.QUIET_REPORT, agent.generation, 0, (number, *agent.totals()[1:])), Content())
        while number not in board.verdicts:
            if not board.news.wait(0.1):
                _check(agent, deadline, _who_is_missing(agent, number))
            board.news.clear()
        if board.verdicts.pop(number) == _PROCEED:
            return
        time.sleep(_NAP_S)


def _check(agent: Agent, deadline: float, reason: str) -> None:
    if time.monotonic() > deadline:
        raise CommTimeout(f"{agent.me}: the other workers were not ready in time: {reason}")
    gone = sorted(agent.left) or departures.among([rank for rank in agent.world_ranks if rank != agent.world_ranks[agent.me.id]])
    if gone:
        names = ", ".join(agent.worker(rank).name for rank in agent.left) or "another rank"
        raise RankFailureError(f"{agent.me} waits for all workers, but {names} has left without a graceful shutdown", gone)


def _who_is_missing(agent: Agent, number: int) -> str:
    if agent.me.id != _COORDINATOR:
        return f"no word from {agent.worker(_COORDINATOR).name}, which collects"
    there = agent.board.reports.get(number, {})
    return "waiting for " + ", ".join(worker.name for worker in agent.get_worker_infos() if worker.id not in there)
