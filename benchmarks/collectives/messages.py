"""Messages under test in the terms of the OSU benchmarks: latency, exchange, message rate.

Ranks form pairs: rank r of the first half with rank r + W/2, W ranks in all. ``size_bytes`` counts
one message. Each case has the same buffers for all contenders.

Source: OSU Micro-Benchmarks 7.4 (osu_latency, osu_mbw_mr, osu_bibw), whose windows are 64 messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from collectives.case import Ways
from harness.timing import Contender, Series

WINDOW = 64
_TAG = 7

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Transport:
    """Message calls of one contender: blocking, and a start that returns a handle with ``wait``."""

    send: Callable[[torch.Tensor, int], object]
    recv: Callable[[torch.Tensor, int], object]
    isend: Callable[[torch.Tensor, int, int], Any]
    irecv: Callable[[torch.Tensor, int, int], Any]


@dataclass(frozen=True)
class Case:
    """Contenders on one set of buffers.

    Attributes:
        messages: Messages of one pass that follow each other, by which its time is divided.
        check: Raises unless the last pass has brought the peer's values.
    """

    contenders: list[Contender]
    messages: int
    check: Callable[[], None]


def transports(ways: Ways) -> dict[str, Transport]:
    raw, native, gloo, byte = ways.raw, ways.native, ways.gloo, ways.mpi.BYTE

    class Handle:
        def __init__(self, request: Any) -> None:
            self.wait = request.Wait

    def spec(tensor: torch.Tensor) -> list[Any]:
        return [tensor.numpy(), byte]

    return {
        "gloo": Transport(
            lambda x, peer: dist.send(x, peer, gloo),
            lambda x, peer: dist.recv(x, peer, gloo),
            lambda x, peer, tag: dist.isend(x, peer, gloo, tag),
            lambda x, peer, tag: dist.irecv(x, peer, gloo, tag),
        ),
        "mpi4py": Transport(
            lambda x, peer: raw.Send(spec(x), peer, 0),
            lambda x, peer: raw.Recv(spec(x), peer, 0),
            lambda x, peer, tag: Handle(raw.Isend(spec(x), peer, tag)),
            lambda x, peer, tag: Handle(raw.Irecv(spec(x), peer, tag)),
        ),
        "mpidist": Transport(
            dist.send,
            dist.recv,
            lambda x, peer, tag: dist.isend(x, peer, None, tag),
            lambda x, peer, tag: dist.irecv(x, peer, None, tag),
        ),
        "native": Transport(native.send, native.recv, native.isend, native.irecv),
    }


def latency(ways: Ways, size_bytes: int, is_fresh: bool) -> Case:
    """Ping-pong; a message is one way.

    Args:
        is_fresh: Each message has a tensor of its own, of memory used before.
    """
    leads, peer = _pair(ways)
    out, into = _filled(ways.rank, size_bytes), torch.zeros(size_bytes, dtype=torch.uint8)

    def ping_pong(way: Transport) -> Callable[[], object]:
        send, recv = way.send, way.recv

        def lead() -> None:
            send(out.clone() if is_fresh else out, peer)
            recv(into, peer)

        def follow() -> None:
            recv(into, peer)
            send(out.clone() if is_fresh else out, peer)

        return lead if leads else follow

    return _case(ways, ping_pong, 2, [into])


def exchange(ways: Ways, size_bytes: int) -> Case:
    """Both ranks of a pair post a receive, send, and wait for both."""
    _, peer = _pair(ways)
    out, into = _filled(ways.rank, size_bytes), torch.zeros(size_bytes, dtype=torch.uint8)

    def both(way: Transport) -> Callable[[], object]:
        def run() -> None:
            incoming = way.irecv(into, peer, _TAG)
            outgoing = way.isend(out, peer, _TAG)
            incoming.wait()
            outgoing.wait()

        return run

    return _case(ways, both, 1, [into])


def rate(ways: Ways, size_bytes: int) -> Case:
    """A window of messages one way, and an answer."""
    leads, peer = _pair(ways)
    out, into = _filled(ways.rank, size_bytes), _window(size_bytes)
    answer = torch.zeros(1, dtype=torch.uint8)

    def one_way(way: Transport) -> Callable[[], object]:
        def lead() -> None:
            for work in [way.isend(out, peer, _TAG) for _ in range(WINDOW)]:
                work.wait()
            way.recv(answer, peer)

        def follow() -> None:
            for work in [way.irecv(place, peer, _TAG) for place in into]:
                work.wait()
            way.send(answer, peer)

        return lead if leads else follow

    return _case(ways, one_way, WINDOW, [] if leads else into)


def both_ways(ways: Ways, size_bytes: int) -> Case:
    """A window of messages in both directions at once."""
    _, peer = _pair(ways)
    out, into = _filled(ways.rank, size_bytes), _window(size_bytes)

    def run_of(way: Transport) -> Callable[[], object]:
        def run() -> None:
            works = [way.irecv(place, peer, _TAG) for place in into]
            works += [way.isend(out, peer, _TAG) for _ in range(WINDOW)]
            for work in works:
                work.wait()

        return run

    return _case(ways, run_of, WINDOW, into)


def posted(ways: Ways, receives: int) -> Case:
    """Post receives of as many tags, which then arrive in the reverse order; a message is one."""
    leads, peer = _pair(ways)
    out, into = _filled(ways.rank, 8), [torch.zeros(8, dtype=torch.uint8) for _ in range(receives)]
    ready = torch.zeros(1, dtype=torch.uint8)

    def many(way: Transport) -> Callable[[], object]:
        def lead() -> None:
            way.recv(ready, peer)
            works = [way.isend(out, peer, _TAG + tag) for tag in reversed(range(receives))]
            for work in works:
                work.wait()

        def follow() -> None:
            works = [way.irecv(place, peer, _TAG + tag) for tag, place in enumerate(into)]
            way.send(ready, peer)
            for work in works:
                work.wait()

        return lead if leads else follow

    return _case(ways, many, receives, [] if leads else into)


def per_message(series: Sequence[Series], case: Case) -> list[Series]:
    """Return the times of one message."""
    return [
        replace(one, rounds_us=tuple(us / case.messages for us in one.rounds_us)) for one in series
    ]


def _case(
    ways: Ways, make: Callable[[Transport], Callable[[], object]], messages: int, into: Tensors
) -> Case:
    _, peer = _pair(ways)

    def check() -> None:
        if not all(bool((place == peer + 1).all()) for place in into):
            raise RuntimeError(f"rank {ways.rank} has not received the values of rank {peer}")
        for place in into:
            place.zero_()

    contenders = [
        Contender(name, (make(way),), tuple(into)) for name, way in transports(ways).items()
    ]
    return Case(contenders, messages, check)


def _pair(ways: Ways) -> tuple[bool, int]:
    half = ways.size // 2
    return ways.rank < half, (ways.rank + half) % ways.size


def _filled(rank: int, size_bytes: int) -> torch.Tensor:
    return torch.full((size_bytes,), rank + 1, dtype=torch.uint8)


def _window(size_bytes: int) -> list[torch.Tensor]:
    return [torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(WINDOW)]
