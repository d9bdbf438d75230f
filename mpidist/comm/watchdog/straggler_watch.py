"""Stragglers of a running job: the watchdogs tell each other their ranks' arrivals.

Once a second each watchdog takes from its recorder which collectives have ended, and once a minute
it sends some of them to the watchdog of the lowest rank that lives: a message of at most 2 KiB a
group. That one compares, and logs each straggler once, with its node.

``MPIDIST_STRAGGLERS`` has the seconds in place of the minute, and 0 turns it off.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping

from mpidist.comm.mpi.world import World
from mpidist.comm.recorder import recorder
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.watchdog import seconds_setting, stragglers
from mpidist.comm.watchdog.arrivals import OwnArrivals
from mpidist.comm.watchdog.watchdog_messages import ARRIVALS
from mpidist.comm.watchdog.watchdog_peers import Peers

ENV_STRAGGLERS = "MPIDIST_STRAGGLERS"
_INTERVAL_S = 60.0
_LOOK_S = 1.0
_LOOKS = 4  # in a short interval

_log = logging.getLogger(__name__)


def interval_s(environ: Mapping[str, str]) -> float:
    """Return the seconds between two comparisons; 0 for none.

    Raises:
        ValueError: ``MPIDIST_STRAGGLERS`` is no number of seconds from 0 on.
    """
    zero = "or 0 for no comparison"
    return seconds_setting.seconds(environ, ENV_STRAGGLERS, _INTERVAL_S, zero)


class StragglerWatch:
    """The part of one watchdog in the comparison.

    Args:
        world: The world.
        peers: The watchdogs of the other ranks.
    """

    def __init__(self, world: World, peers: Peers) -> None:
        self._world, self._peers = world, peers
        self._interval_s = interval_s(os.environ)
        now = time.monotonic()
        self._next_look = now
        self._next_told = now + self._interval_s
        self._own: OwnArrivals | None = None

    def look(self) -> None:
        """Do what is due; called by the watchdog's thread ten times a second."""
        now = time.monotonic()
        if not self._interval_s or now < self._next_look:
            return
        self._next_look = now + min(_LOOK_S, self._interval_s / _LOOKS)
        if self._own is None:
            ring = recorder.of_process()
            if not isinstance(ring, Ring):
                self._interval_s = 0.0
                return
            self._own = OwnArrivals(ring)
        self._own.look()
        if now >= self._next_told:
            self._next_told = now + self._interval_s
            self._tell(self._own)

    def _tell(self, own: OwnArrivals) -> None:
        world, peers, told = self._world, self._peers, own.told()
        ended = {*peers.left, *peers.dead()}
        lowest = min(rank for rank in range(world.size) if rank not in ended)
        if lowest != world.rank:
            if told:
                peers.send((lowest,), ARRIVALS, told)
            return
        peers.arrivals.add(world.rank, told)
        for found in peers.arrivals.found():
            host = world.processes[found.straggler.rank].host
            _log.warning(
                "%s", stragglers.sentence(found.straggler, found.label, host, found.step_ns)
            )
