"""Random call graphs: trees of calls, references and errors, run over RPC and by plain recursion.

``run`` of a node makes its calls from the worker that runs the node; ``expected`` computes the same
value or error without RPC. Each call adds the rank of its worker to the value, so that a call on a
wrong worker gives a wrong value.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

import mpidist.rpc as rpc
from mpidist.errors import CommTimeout, RRefError

DEPTH = 4
PATIENT_S = 30  # the limit of calls that must not time out
SIZES = (0, 3, 2000, 9000, 100_000)  # elements: within an eager message's 32 KiB, and beyond
TIMEOUTS = (1e-4, 1e-3, 5e-3, 5e-2)
WAYS = ("sync", "async", "remote")


class GraphError(Exception):
    """An error of the graph's own, with two arguments."""


ERRORS: tuple[type[Exception], ...] = (ValueError, KeyError, ZeroDivisionError, GraphError)


class Node:
    """A part of a graph."""

    def run(self) -> Any:
        raise NotImplementedError

    def expected(self) -> Any:
        raise NotImplementedError


def there(node: Node) -> tuple[int, Any]:
    """Run a node on the called worker; return that worker's rank and the value."""
    return rpc.get_worker_info().id, node.run()


def called(way: str, to: int, node: Node, timeout: float = PATIENT_S) -> Any:
    """Run a node on a worker, in one of the ways; return its rank and the value."""
    if way == "sync":
        return rpc.rpc_sync(to, there, args=(node,), timeout=timeout)
    if way == "async":
        return rpc.rpc_async(to, there, kwargs={"node": node}, timeout=timeout).wait()
    return rpc.remote(to, there, args=(node,), timeout=timeout).to_here(timeout=PATIENT_S)


@dataclass(frozen=True)
class Leaf(Node):
    """A value that is made where it is asked for."""

    kind: str
    number: int

    def run(self) -> Any:
        return self.expected()

    def expected(self) -> Any:
        size = SIZES[self.number % len(SIZES)]
        if self.kind == "tensor":
            return torch.arange(size, dtype=torch.float32) + self.number
        if self.kind == "views":
            whole = torch.arange(2 * size) - self.number
            return [whole[::2], whole[1::2]]
        if self.kind == "array":
            return np.arange(size, dtype=np.int16) * (self.number % 7)
        if self.kind == "text":
            return f"{self.number} " * (size // 4)
        return {"number": -self.number * 2**60, (1, self.number): None}


@dataclass(frozen=True)
class Join(Node):
    """Several values of one worker, one after the other."""

    parts: tuple[Node, ...]

    def run(self) -> Any:
        return [part.run() for part in self.parts]

    def expected(self) -> Any:
        return [part.expected() for part in self.parts]


@dataclass(frozen=True)
class Call(Node):
    """A call that is waited for at once."""

    way: str
    to: int
    body: Node

    def run(self) -> Any:
        return called(self.way, self.to, self.body)

    def expected(self) -> Any:
        return self.to, self.body.expected()


@dataclass(frozen=True)
class Crowd(Node):
    """Calls that are all pending before the first wait; after an error, the rest is abandoned."""

    calls: tuple[tuple[int, Node], ...]

    def run(self) -> Any:
        futures = [
            rpc.rpc_async(to, there, args=(body,), timeout=PATIENT_S) for to, body in self.calls
        ]
        return [future.wait() for future in futures]

    def expected(self) -> Any:
        return [(to, body.expected()) for to, body in self.calls]


@dataclass(frozen=True)
class Handed(Node):
    """A reference that is passed through workers in arguments and results, and read on each.

    Attributes:
        owner: The worker that has the value; None for the worker that runs this node.
        through: The workers that receive the reference in turn.
        drops: The first worker deletes the reference as soon as the message is sent.
    """

    owner: int | None
    through: tuple[int, ...]
    drops: bool
    body: Node

    def run(self) -> Any:
        if self.owner is None:
            rref = rpc.RRef((None, self.body.run()))
        else:
            rref = rpc.remote(self.owner, there, args=(self.body,), timeout=PATIENT_S)
        future = rpc.rpc_async(
            self.through[0], handed_on, args=({"rref": rref}, self.through[1:]), timeout=PATIENT_S
        )
        if self.drops:
            del rref
        values, back = future.wait()
        return [back.to_here(timeout=PATIENT_S), *values]

    def expected(self) -> Any:
        value = (self.owner, self.body.expected())
        return [value] * (1 + len(self.through))


def handed_on(held: dict[str, Any], through: tuple[int, ...]) -> tuple[list[Any], Any]:
    """Read a reference, pass it on, and return the values that were read and the reference."""
    rref = held["rref"]
    values = []
    if through:
        values, rref = rpc.rpc_sync(
            through[0], handed_on, args=({"rref": rref}, through[1:]), timeout=PATIENT_S
        )
    return [rref.to_here(timeout=PATIENT_S), *values], rref


@dataclass(frozen=True)
class Within(Node):
    """A reference to a value that holds a reference to a value on another worker."""

    outer: int
    inner: int
    body: Node

    def run(self) -> Any:
        rref = rpc.remote(self.outer, holding, args=(self.inner, self.body), timeout=PATIENT_S)
        return rref.to_here(timeout=PATIENT_S)[0].to_here(timeout=PATIENT_S)

    def expected(self) -> Any:
        return self.inner, self.body.expected()


def holding(owner: int, body: Node) -> list[Any]:
    """Make a reference, and return it in a container."""
    return [rpc.remote(owner, there, args=(body,), timeout=PATIENT_S)]


class Tally:
    """A value with methods."""

    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


@dataclass(frozen=True)
class Counted(Node):
    """An object of a worker, whose methods are called through proxies, one after the other."""

    owner: int
    steps: tuple[tuple[str, int], ...]

    def run(self) -> Any:
        rref = rpc.remote(self.owner, Tally, args=(5,), timeout=PATIENT_S)
        counts = []
        for way, number in self.steps:
            if way == "sync":
                counts.append(rref.rpc_sync(timeout=PATIENT_S).add(number))
            elif way == "async":
                counts.append(rref.rpc_async(timeout=PATIENT_S).add(number=number).wait())
            else:
                counts.append(rref.remote(timeout=PATIENT_S).add(number).to_here(timeout=PATIENT_S))
        return counts

    def expected(self) -> Any:
        return [5 + total for total in itertools.accumulate(number for _, number in self.steps)]


@dataclass(frozen=True)
class Fail(Node):
    """An error."""

    number: int

    def run(self) -> Any:
        return self.expected()

    def expected(self) -> Any:
        raise ERRORS[self.number % len(ERRORS)](f"fault {self.number}", self.number)


@dataclass(frozen=True)
class Caught(Node):
    """A call whose error, if it raises one, is the value."""

    way: str
    to: int
    body: Node

    def run(self) -> Any:
        return outcome(lambda: called(self.way, self.to, self.body))

    def expected(self) -> Any:
        return outcome(lambda: (self.to, self.body.expected()))


@dataclass(frozen=True)
class Race(Node):
    """A call with a short timeout: either the answer is right, or the call times out.

    Attributes:
        way: ``fetch`` for a short timeout of ``to_here``; else the call's own timeout is short.
    """

    way: str
    to: int
    timeout: float
    body: Node

    def run(self) -> Any:
        try:
            if self.way != "fetch":
                return called(self.way, self.to, self.body, self.timeout)
            return rpc.remote(self.to, there, args=(self.body,), timeout=PATIENT_S).to_here(
                timeout=self.timeout
            )
        except CommTimeout:
            return self.expected()
        except RRefError as error:
            if self.way != "remote" or "timed out" not in str(error):
                raise
            return self.expected()

    def expected(self) -> Any:
        return self.to, self.body.expected()


@dataclass(frozen=True)
class Rest(Node):
    """Time in which a function does nothing, so that it is known as a slow one."""

    body: Node

    def run(self) -> Any:
        time.sleep(1e-3)
        return self.body.run()

    def expected(self) -> Any:
        return self.body.expected()


KINDS: tuple[type[Node], ...] = (
    Leaf,
    Join,
    Call,
    Crowd,
    Handed,
    Within,
    Counted,
    Fail,
    Caught,
    Race,
    Rest,
)


def node(rng: random.Random, size: int, depth: int = DEPTH) -> Node:
    """Draw a node whose calls are at most ``depth`` deep.

    Args:
        rng: Random numbers.
        size: The number of workers.
        depth: 0 gives a value or an error.
    """

    def body(less: int = 1) -> Node:
        return node(rng, size, max(0, depth - less))

    def worker() -> int:
        return rng.randrange(size)

    if depth == 0:
        if rng.random() < 0.08:
            return Fail(rng.randrange(1000))
        return Leaf(rng.choice(("tensor", "views", "array", "text", "plain")), rng.randrange(1000))
    kind = rng.choice(
        (Leaf, Join, Call, Call, Crowd, Handed, Handed, Within, Counted, Caught, Race, Rest)
    )
    if kind is Leaf:
        return node(rng, size, 0)
    if kind is Join:
        return Join((body(), body()))
    if kind is Call:
        return Call(rng.choice(WAYS), worker(), body())
    if kind is Crowd:
        return Crowd(tuple((worker(), body(2)) for _ in range(rng.randint(2, 5))))
    if kind is Handed:
        through = tuple(worker() for _ in range(rng.randint(1, 3)))
        return Handed(rng.choice((None, worker(), worker())), through, rng.random() < 0.5, body(2))
    if kind is Within:
        return Within(worker(), worker(), body(2))
    if kind is Counted:
        return Counted(worker(), tuple((rng.choice(WAYS), rng.randrange(9)) for _ in range(3)))
    if kind is Caught:
        return Caught(
            rng.choice(WAYS), worker(), Fail(rng.randrange(1000)) if rng.random() < 0.5 else body()
        )
    if kind is Race:
        return Race(rng.choice((*WAYS, "fetch")), worker(), rng.choice(TIMEOUTS), body())
    return Rest(body())


def nodes_of(root: Any) -> Iterator[Node]:
    """All nodes of a graph."""
    if isinstance(root, Node):
        yield root
        for item in fields(root):  # type: ignore[arg-type]
            yield from nodes_of(getattr(root, item.name))
    elif isinstance(root, tuple):
        for part in root:
            yield from nodes_of(part)


def outcome(make: Callable[[], Any]) -> tuple[Any, ...]:
    """What a call returned or raised, as a value."""
    try:
        return "returned", make()
    except ERRORS as error:
        return "raised", type(error), error.args


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal in types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


_wrong: list[str] = []


def judge(root: Node) -> None:
    """Run a graph, and note on this worker if it does not end as it must."""
    try:
        found, expected = outcome(root.run), outcome(root.expected)
        if not is_same(found, expected):
            _wrong.append(f"{root} gave {found!r:.500} and not {expected!r:.500}")
    except BaseException as error:
        _wrong.append(f"{root} raised {error!r:.500}")


def take_wrong() -> list[str]:
    """What was noted on this worker since the last time."""
    found = _wrong[:]
    _wrong.clear()
    return found
