"""A user's module for tests of the allowlist: definitions, imports, and targets of attacks."""

import collections
import dataclasses
import functools
import os
import subprocess
from os import getcwd  # noqa: F401
from typing import NamedTuple

import torch

import mpidist.rpc as rpc
from mpidist.rpc.rref import Proxy

CONSTANT = 5
ran = []  # what user code has run that no message may run


def step(x, y=1):
    return x + y


def apply(function, *args):
    return function(*args)


def _private():
    return 1


also_step = step
system = os.system
run = subprocess.run
add = torch.add
mul = torch.ops.aten.mul


@functools.lru_cache
def cached(x):
    return x


@torch.no_grad()
def decorated(x):
    return x


@rpc.functions.async_execution
def later(x):
    future = torch.futures.Future()
    future.set_result(x)
    return future


@functools.wraps(os.system)
def wraps_foreign(command):
    return command


def make_local():
    class Local:
        def get(self):
            return 1

    return Local()


class Meta(type):
    """Lies about its classes wherever Python lets it."""

    @property
    def __module__(cls):
        ran.append("__module__")
        return "tests.rpc.listed_module"

    def __eq__(cls, other):
        ran.append("__eq__")
        return True

    def __hash__(cls):
        return hash(Server)

    def __instancecheck__(cls, instance):
        return True

    def __getattribute__(cls, name):
        ran.append(name)
        return super().__getattribute__(name)


class Base:
    def inherited(self):
        return "inherited"

    @classmethod
    def made_by_base(cls):
        return cls()


class Equal(type):
    """A metaclass of classes that are equal to all others."""

    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return hash(type(step))


class Descriptor(metaclass=Equal):
    """A descriptor that runs code when it is read; its class is equal to that of functions."""

    def __get__(self, obj, owner=None):
        ran.append("Descriptor.__get__")
        return os.system


class Server(Base):
    """Has one of everything that a class may have."""

    count = 3
    run = subprocess.run
    popen = os.popen
    system = os.system
    static_system = staticmethod(os.system)
    class_system = classmethod(os.system)
    partial_system = functools.partialmethod(os.system)
    cached_run = functools.lru_cache(subprocess.run)
    of_class = staticmethod(subprocess.Popen)
    partial = functools.partial(os.system)
    descriptor = Descriptor()
    helper = step
    Thread = collections.OrderedDict

    class Nested:
        def get(self):
            return 1

    def __init__(self, value=0):
        self.value = value
        self.instance_function = os.system

    def __call__(self, x):
        return ("called", x)

    def get(self):
        return self.value

    def _inner(self):
        return self.value

    def __secret(self):
        return self.value

    @property
    def evil(self):
        ran.append("property")
        return os.system

    @functools.cached_property
    def cached_evil(self):
        ran.append("cached_property")
        return os.system

    def __getattr__(self, name):
        ran.append(f"__getattr__ {name}")
        return os.system

    def __getattribute__(self, name):
        if name not in ("value", "instance_function"):
            ran.append(f"__getattribute__ {name}")
        return super().__getattribute__(name)

    @staticmethod
    def fixed(x):
        return ("fixed", x)

    @classmethod
    def named(cls):
        return cls

    @staticmethod
    def _hidden():
        return 1

    @torch.no_grad()
    def without_grad(self):
        return torch.is_grad_enabled()

    @rpc.functions.async_execution
    def later(self):
        future = torch.futures.Future()
        future.set_result(self.value)
        return future

    @staticmethod
    @rpc.functions.async_execution
    def later_static():
        future = torch.futures.Future()
        future.set_result(1)
        return future

    @functools.lru_cache  # noqa: B019
    def cached(self):
        return "cached"

    twice = functools.partialmethod(__call__, 2)

    @functools.singledispatchmethod
    def by_type(self, x):
        return ("any", x)

    @by_type.register
    def _(self, x: int):
        return ("int", x)


class Heir(Server):
    def own(self):
        return "own"


class Impostor(metaclass=Meta):
    def get(self):
        return 1


class Claims:
    """Its ``__class__`` is falsely ``Server``."""

    @property
    def __class__(self):
        ran.append("__class__")
        return Server

    def get(self):
        return 1


class ListWithMethod(list):
    def total(self):
        return sum(self)


class CustomError(Exception):
    def __init__(self, text, code=0):
        super().__init__(text, code)


class Ends(BaseException):
    pass


@dataclasses.dataclass
class Point:
    x: int
    y: float = 2.0

    def __post_init__(self):
        ran.append("__post_init__")


@dataclasses.dataclass
class Closing:
    path: str

    def __del__(self):
        ran.append(f"closed {self.path}")


class ClosingHeir(Closing):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    tags: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenHeir(Frozen):
    more: str = ""


@dataclasses.dataclass(kw_only=True)
class Various:
    given: dataclasses.InitVar[int]
    kind: str
    doubled: int = dataclasses.field(init=False)
    constant: int = dataclasses.field(init=False, default=7)
    default_var: dataclasses.InitVar[int] = 4

    def __post_init__(self, given, default_var):
        ran.append("__post_init__")
        self.doubled = 2 * given

    @functools.cached_property
    def costly(self):
        return self.doubled + 1


@dataclasses.dataclass
class PointIn3(Point):
    z: int = 0


class Undecorated(Point):
    """Inherits its fields."""


@dataclasses.dataclass
class WithMore:
    x: int

    def __post_init__(self):
        self.length = 1


@dataclasses.dataclass
class OfDict(dict):
    x: int = 0


@dataclasses.dataclass
class OfError(Exception):
    x: int = 0


class Guard:
    """A descriptor that runs code when it is set."""

    def __get__(self, obj, owner=None):
        return 0

    def __set__(self, obj, value):
        ran.append("Guard.__set__")


@dataclasses.dataclass
class Guarded:
    x: int = Guard()


@dataclasses.dataclass
class Setting:
    x: int

    def __new__(cls, *args):
        ran.append("__new__")
        return super().__new__(cls)

    def __setattr__(self, name, value):
        ran.append("__setattr__")
        super().__setattr__(name, value)

    def __getattribute__(self, name):
        if name == "x":
            ran.append("__getattribute__")
        return super().__getattribute__(name)


class Hidden:
    __slots__ = ("secret",)


@dataclasses.dataclass
class WithHiddenSlot(Hidden):
    x: int


@dataclasses.dataclass
class EqualToPoint(metaclass=Equal):
    """A record whose metaclass makes it equal to every class."""

    other: str


class Unhashable(type):
    def __eq__(cls, other):
        return cls is other


@dataclasses.dataclass
class OfUnhashableClass(metaclass=Unhashable):
    x: int


class Pair(NamedTuple):
    left: int
    right: str = "r"


class ClosingPair(Pair):
    def __del__(self):
        ran.append("closed")


class PairHeir(Pair):
    def __new__(cls, *args):
        ran.append("__new__")
        return super().__new__(cls, *args)


Triple = collections.namedtuple("Triple", "a b c")


class Proxied(Proxy):
    """A user's class that inherits one of the library's."""


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1
