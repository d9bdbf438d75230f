"""The agent of this process, None while RPC is not initialised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.errors import MpidistError

if TYPE_CHECKING:
    from mpidist.rpc.agent import Agent

agent: Agent | None = None
absence = "RPC has not been initialized. Call mpidist.rpc.init_rpc first."  # error for None


def require() -> Agent:
    """Return the agent.

    Raises:
        MpidistError: ``init_rpc`` was not called, or ``shutdown`` was, or this process was forked
            from a worker.
    """
    if agent is None:
        raise MpidistError(absence)
    return agent
