"""Time to write and read the arguments of a call: mpidist's codec and torch's pickler.

python benchmarks/bench_values.py

Processor time of one thread, so that other processes do not count. A message is written into one
buffer and read back into arguments; torch's time is that of its pickler alone, without the messages
that its C++ makes of pickle and tensors. No message leaves the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.rpc.internal import PythonUDF, _internal_rpc_pickler

from harness import benchmark_options, environment, report, tables
from mpidist import comm
from mpidist.rpc.names.allowlist import Allowed
from mpidist.rpc.values import codec
from mpidist.rpc.values.codec import Decoder

Call = tuple[tuple[Any, ...], dict[str, Any]]
# A function's wire name, which the encoders read only to see that there is one.
_NAME = b"operator"
_SETTINGS = {"lr": 0.1, "steps": [1, 2, 3], "model": {"layers": 4, "width": (64, 32)}}


def calls() -> dict[str, Call]:
    """Return the arguments of each call, by its name in the table."""
    tensor = torch.arange(256.0)
    return {
        "no arguments": ((), {}),
        "(1, 2)": ((1, 2), {}),
        '("name", 3, 0.5)': (("name", 3, 0.5), {}),
        "a tensor of 1 KiB": ((tensor,), {}),
        "a dict of two tensors": (({"a": tensor, "b": tensor + 1},), {}),
        "three keywords": ((), {"a": 1, "b": "x", "c": 0.5}),
        "a nested dict of settings": ((_SETTINGS,), {}),
        "100 tuples": (([(number, str(number)) for number in range(100)],), {}),
        "1,000 floats": (([0.5 * number for number in range(1000)],), {}),
        "a dict of 100 str": (({f"key{n}": f"value{n}" for n in range(100)},), {}),
        "a list of 1,000 tensors": (([torch.full((4,), float(n)) for n in range(1000)],), {}),
    }


def contenders() -> dict[str, Callable[[Call], Call]]:
    """Return functions that write and read a call's arguments, by name."""
    return {
        "mpidist": _by(None, Decoder(None)),
        "with a list": _by("worker", Decoder(Allowed([]))),
        "torch": _by_torch,
    }


def _by(data_only: str | None, reader: Decoder) -> Callable[[Call], Call]:
    def there_and_back(call: Call) -> Call:
        content = codec.encode_function(torch.add, _NAME, *call, data_only)
        if content is codec.EMPTY:
            return (), {}  # the message has no content
        flags, body, parts, _ = content.body(None)
        # The receiver's memory; parts are received in place.
        data = reader.decode(flags, bytearray(body), 0, parts)
        args, kwargs = codec.arguments(flags, data)
        return tuple(args), kwargs

    return there_and_back


def _by_torch(call: Call) -> Call:
    data, tensors = _internal_rpc_pickler.serialize(PythonUDF(torch.add, *call))
    function = _internal_rpc_pickler.deserialize(data, tensors)
    return function.args, function.kwargs


def measured(call: Call, rounds: int, burst_s: float) -> dict[str, float]:
    """Return the first quartile of the rounds by contender, in µs; contenders take turns.

    Raises:
        RuntimeError: What was read is not what was written.
    """
    ways = contenders()
    passes = {}
    for name, way in ways.items():
        if not _is_equal(way(call), call):
            raise RuntimeError(f"{name} read {way(call)!r} where {call!r} was written")
        start = time.thread_time()
        way(call)
        passes[name] = max(1, round(burst_s / max(time.thread_time() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.thread_time()
            for _ in range(passes[name]):
                way(call)
            times[name].append(1e6 * (time.thread_time() - start) / passes[name])
    return {name: float(np.quantile(us, 0.25)) for name, us in times.items()}


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(_is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        same = type(left) is type(right) and len(left) == len(right)
        return same and all(map(_is_equal, left, right))
    return bool(left == right)


def main() -> None:
    options = benchmark_options.parser(__doc__, "quick", rounds=15).parse_args()
    torch.set_num_threads(1)
    rounds, burst_s = (1, 1e-4) if options.quick else (options.rounds, 0.02)
    results = [
        {"arguments": name, "us": measured(call, rounds, burst_s)} for name, call in calls().items()
    ]
    group = comm.init()
    if group.rank:
        return
    from mpi4py import MPI

    names = list(contenders())
    rows = [
        [one["arguments"], *one["us"].values(), one["us"]["torch"] / one["us"]["mpidist"]]
        for one in results
    ]
    print(tables.text(rows, ["µs", *names, "torch / mpidist"], floats=".3g"))
    record = {
        "benchmark": "values",
        "environment": environment.describe(MPI.COMM_SELF),
        "rounds": rounds,
        "results": results,
    }
    report.write_json(record, options.output / "values.json")


if __name__ == "__main__":
    main()
