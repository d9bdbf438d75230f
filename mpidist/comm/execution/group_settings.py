"""Settings of a process group, which all its ranks share."""

from __future__ import annotations

from dataclasses import dataclass

# Effect of a timeout: end of the job, or an error in the caller.
ABORT, RAISE = "abort", "raise"


@dataclass(frozen=True)
class GroupSettings:
    """Settings of one group.

    Attributes:
        name: The group's name, for messages.
        key: Identifies the group; the same text on all its ranks.
        world_ranks: The members' ranks in the world, in group order.
        timeout_s: Longest time of an operation until the watchdog reports it; None for no limit.
        debug: All ranks compare their operations; ``MPIDIST_DEBUG=1`` if None.
        on_timeout: ``ABORT`` or ``RAISE``.
    """

    name: str
    key: str
    world_ranks: tuple[int, ...]
    timeout_s: float | None
    debug: bool | None = None
    on_timeout: str = ABORT
