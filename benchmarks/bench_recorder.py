"""Time the recorder's entry, and all-reduces, messages, calls and DDP steps with it and without.

mpirun --oversubscribe -n 2 python benchmarks/bench_recorder.py
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import torch

import mpidist.rpc as rpc
from harness import benchmark_options, timing
from harness.job import Job
from mpidist.comm import ProcessGroup
from mpidist.comm.recorder import recorder, recording
from mpidist.comm.recorder.recorder import Off
from mpidist.ddp import DistributedDataParallel
from mpidist.rpc import current
from mpidist.rpc.calls.call_entries import CallEntries

ENTRY_GOAL_US = 0.5
GOALS = {"all_reduce of 8 bytes": 1.1, "rpc_sync of a no-op": 1.05, "step of DDP": 1.003}

Calls = dict[str, Callable[[], object]]  # by contender


def main() -> None:
    parser = benchmark_options.parser(__doc__, rounds=40, burst_s=0.02)
    parser.add_argument("--entries", type=int, default=200_000, help="entries of a round")
    parser.add_argument("--width", type=int, default=512, help="of the DDP model's layers")
    options = parser.parse_args()
    with Job() as job:
        world, raw = job.group, job.raw
        timing.touch_memory()
        entry = _entry(options.entries)
        if job.is_first:
            print(
                f"begin and end {entry['us']:.3f} us, of which the clock {entry['clock_us']:.3f} us"
                f"  {_verdict(entry['us'], ENTRY_GOAL_US)}",
                flush=True,
            )
        with _off():
            off = world.clone("off")
        on = world.clone("on")
        rows = [
            _row(raw, "all_reduce of 8 bytes", {"on": _reduce(on), "off": _reduce(off)}, options),
            _row(raw, "message of 8 bytes", {"on": _ping(on), "off": _ping(off)}, options),
            _calls(raw, world, options),
            _steps(raw, on, off, options),
        ]
        if job.is_first:
            fields = {"rounds": options.rounds, "entry": entry, "rows": rows}
            job.write(options.output, "recorder", fields)


@contextmanager
def _off() -> Iterator[None]:
    """Turn the recorder off for the groups and models that are made in the block."""
    made = recorder.of_process()
    recorder._recorder = Off()
    try:
        yield
    finally:
        recorder._recorder = made


def _entry(entries: int) -> dict[str, float]:
    """Return the microseconds of a begin and its end; check what they have stored."""
    made = recorder.of_process()
    begin, end = made.begin, made.end
    signature = made.signature("collective", "all_reduce", "", "float32", (2,))

    def both() -> None:
        end(begin(signature, 17, 8))

    def nothing() -> None:
        pass

    times = [min(timeit.repeat(call, number=entries, repeat=9)) for call in (both, nothing)]
    clock = 2 * min(timeit.repeat(monotonic_ns, number=entries, repeat=9))
    assert made.path is not None
    last = recording.read(made.path).entries[-1]
    if (last.operation, last.sequence, last.size_bytes) != ("all_reduce", 17, 8):
        raise SystemExit(f"the last entry is {last}")
    return {"us": 1e6 * (times[0] - times[1]) / entries, "clock_us": 1e6 * clock / entries}


def _reduce(group: ProcessGroup) -> Callable[[], object]:
    value = torch.zeros(2)
    return lambda: group.all_reduce(value)


def _ping(group: ProcessGroup) -> Callable[[], object]:
    """Return one way of a ping-pong of pairs: both calls of a rank, of which each is one entry."""
    value, peer = torch.zeros(2), group.rank ^ 1
    if peer >= group.size:
        return lambda: None

    def pong() -> None:
        for is_send in (True, False) if group.rank < peer else (False, True):
            if is_send:
                group.send(value, peer)
            else:
                group.recv(value, peer)

    return pong


def _nothing() -> None:
    """Do nothing."""


def _calls(raw: Any, world: ProcessGroup, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of calls by rank 0, while the others answer."""
    rpc.init_rpc(f"worker{world.rank}", group=world)
    agent: Any = current.require()
    on = agent.calls._entries, agent.handled
    with _off():
        off = CallEntries("call"), CallEntries("handler")

    def contender(entries: tuple[CallEntries, CallEntries]) -> Callable[[], object]:
        def call() -> None:
            if world.rank == 0:
                rpc.rpc_sync("worker1", _nothing)

        def choose() -> None:
            calls, agent.handled = entries
            agent.calls._entries = calls
            agent.calls._begin, agent.calls._end = calls.begin, calls.end

        call.choose = choose  # type: ignore[attr-defined]
        return call

    row = _row(raw, "rpc_sync of a no-op", {"on": contender(on), "off": contender(off)}, options)
    rpc.shutdown()
    return row


def _steps(
    raw: Any, on: ProcessGroup, off: ProcessGroup, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the row of training steps of a small model, where an entry weighs most."""
    inputs = torch.ones(16, options.width)

    def contender(group: ProcessGroup) -> Callable[[], object]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(options.width, options.width) for _ in range(4)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

        return step

    calls = {"on": contender(on), "off": contender(off)}
    return _row(raw, "step of DDP", calls, options)


def _row(raw: Any, what: str, calls: Calls, options: argparse.Namespace) -> dict[str, Any]:
    """Return medians with the recorder and without, in turns; print them on rank 0."""

    def chosen(comm: Any, contender: timing.Contender, passes: int) -> float:
        (call,) = contender.calls
        getattr(call, "choose", lambda: None)()
        # What comes first finds the caches of the other.
        timing.burst(comm, contender, 1)
        return timing.burst(comm, contender, passes)

    contenders = [timing.Contender(name, (call,), ()) for name, call in calls.items()]
    series = timing.time_rounds(raw, contenders, options.rounds, options.burst_s, chosen)
    row = {
        "what": what,
        **{f"{one.name}_us": one.median_us for one in series},
        # Of bursts side by side: disturbances of the machine last longer than one.
        "ratio": timing.compare(*series).ratio_of_rounds,
    }
    if raw.rank == 0:
        goal = f"  {_verdict(row['ratio'], GOALS[what])}" if what in GOALS else ""
        print(
            f"{what:>22}: on {row['on_us']:>9.2f} us  off {row['off_us']:>9.2f} us  "
            f"{row['ratio']:.3f}{goal}",
            flush=True,
        )
    return row


def _verdict(value: float, goal: float) -> str:
    return f"(goal {goal:g}: {'met' if value <= goal else 'missed'})"


if __name__ == "__main__":
    main()
