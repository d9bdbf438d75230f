"""Attacks by names: functions outside of the list, in every spelling."""

from __future__ import annotations

import struct

from mpidist.rpc.message import COUNT, Kind
from tests.rpc.attacks.attacker import Attacker, Attacks

attack = Attacks()

REFUSED = "may not be called|not in the list"
VICTIM = "tests.rpc.attacks.victim"

_PYTHON = {
    "system": ("A function of the operating system", "os:system"),
    "system_in_c": ("… under the name of its C module", "posix:system"),
    "evaluate": ("eval", "builtins:eval"),
    "execute": ("exec", "builtins:exec"),
    "get_attribute": ("getattr", "builtins:getattr"),
    "import_module": ("An import", "importlib:import_module"),
    "unlisted": ("A function of a module that was never listed", "tests.rpc.attacks.canary:fire"),
    "unlisted_class": ("A class that was never listed", "tests.rpc.attacks.canary:Bird"),
    "unlisted_record": (
        "A dataclass of a module of which other names are listed",
        f"{VICTIM}:Unlisted",
    ),
    "imported_there": ("What the module of a listed function imports", f"{VICTIM}:canary.fire"),
    "instance_there": ("A method of an instance in that module", f"{VICTIM}:log.close"),
    "globals_of_function": ("The globals of a listed function", f"{VICTIM}:look.__globals__.clear"),
    "globals_of_method": (
        "The globals of a method of a listed class",
        f"{VICTIM}:Box.get.__globals__.clear",
    ),
    "globals_of_constructor": (
        "The globals of a listed class's constructor",
        f"{VICTIM}:Box.__init__.__globals__.copy",
    ),
    "builtins_of_function": ("A listed function's builtins", f"{VICTIM}:look.__builtins__.get"),
    "class_of_class": ("The metaclass of a listed class", f"{VICTIM}:Box.__class__"),
    "class_of_function": ("The class of functions", f"{VICTIM}:look.__class__"),
    "subclasses": ("The subclasses of a base", f"{VICTIM}:Box.__base__.__subclasses__"),
    "mro": ("The order of resolution", f"{VICTIM}:Box.mro"),
    "private": ("A private method of a listed class", f"{VICTIM}:Box._hidden"),
    "constructor": ("A listed class's __init__ by itself", f"{VICTIM}:Box.__init__"),
    "new": ("A listed class's __new__ by itself", f"{VICTIM}:Box.__new__"),
    "reduce": ("How a listed class is pickled", f"{VICTIM}:Box.__reduce__"),
    "set_attribute": (
        "The assignment to attributes of a listed class",
        f"{VICTIM}:Box.__setattr__",
    ),
    "getter": ("The function behind a property", f"{VICTIM}:Box.price.fget"),
    "inherited": (
        "A method that a listed class inherits from one that is not",
        f"{VICTIM}:Box.inherited",
    ),
    "call_of_function": ("A listed function's __call__", f"{VICTIM}:look.__call__"),
    "get_of_function": ("A listed function's __get__", f"{VICTIM}:look.__get__"),
    "call_method": ("The library's own call of methods", "mpidist.rpc.serving.methods:call_method"),
    "type_of": ("The library's own question for a type", "mpidist.rpc.serving.methods:type_of"),
    "has_attribute": (
        "The library's own question for an attribute",
        "mpidist.rpc.serving.methods:has_method",
    ),
    "require": ("The agent itself", "mpidist.rpc.current:require"),
    "gather": ("A gathering's leader", "mpidist.rpc.worker_gather:gather_to_leader"),
    "broadcast": ("A gathering's follower", "mpidist.rpc.worker_gather:_broadcast_to_followers"),
    "shut_down": ("The end of RPC", "mpidist.rpc.api:shutdown"),
    "allowed_itself": ("The class of the list itself", "mpidist.rpc.names.allowlist:Allowed"),
    "worker_info": ("A class of the library that data may hold", "mpidist.rpc.worker:WorkerInfo"),
    "error_class": ("An exception of the library", "mpidist.errors:MpidistError"),
    "optimizer": ("The entry for optimizers, which is not listed", "mpidist.optim.local:make"),
    "remote_module": (
        "The entry for remote modules, which is not listed",
        "mpidist.nn.remote:execute",
    ),
    "script_module": ("The reader of script modules", "mpidist.rpc.values.pickles:_script_module"),
    "with_attributes": (
        "What pickles of tensors call",
        "mpidist.comm.serialization.tensor_pickle:_with_attributes",
    ),
    "cyrillic": ("A letter that looks the same", f"{VICTIM}:l\u043eok"),
    "full_width": ("A letter that NFKC makes the same", f"{VICTIM}:\uff4cook"),
    "nul": ("A NUL behind the name", f"{VICTIM}:look\0"),
    "nul_between": ("A NUL within the name", f"{VICTIM}\0:look"),
    "blank": ("A blank behind the name", f"{VICTIM}:look "),
    "newline": ("A newline behind the name", f"{VICTIM}:look\n"),
    "upper": ("Another case", f"{VICTIM}:LOOK"),
    "dots_only": ("A dot in the place of the colon", f"{VICTIM}.look"),
    "two_colons": ("Two colons", f"{VICTIM}::look"),
    "colon_behind": ("A colon behind the name", f"{VICTIM}:look:"),
    "no_module": ("No module", ":look"),
    "no_name": ("No name", f"{VICTIM}:"),
    "lone_colon": ("Neither", ":"),
    "main": ("The program", "__main__:__builtins__"),
    "relative": ("A relative module", ".victim:look"),
    "long": ("A name of 30,000 bytes", f"{VICTIM}:" + "a" * 30_000),
    "many_dots": ("A path of 10,000 steps", f"{VICTIM}:look" + ".x" * 10_000),
    "operator_as_function": ("An operator's name in the place of a function's", "aten::mul"),
    "surrogate": ("A surrogate, which UTF-8 has not", f"{VICTIM}:look\udc80"),
}

_OPERATORS = {
    "class_of_operator": ("The class of an operator", "aten::add.__class__"),
    "constructor_of_operators": ("A dunder in the place of an operator", "aten::__init__"),
    "globals_of_operator": ("The globals of an operator", "aten::add.__globals__"),
    "call_of_operator": ("An operator's __call__", "torch.add.__call__"),
    "other_operator": ("An operator that is not listed", "aten::mul"),
    "other_function": ("A builtin function of torch that is not listed", "torch.mul"),
    "load": ("torch.load", "torch.load"),
    "hub": ("torch.hub.load", "torch.hub.load"),
    "namespace": ("The namespace of operators itself", "torch.ops"),
    "extension": ("torch's extension module", "torch._C"),
    "load_library": ("torch.ops.load_library", "torch.ops.load_library"),
    "primitive": ("A primitive of the interpreter", "prim::Print"),
    "bare_namespace": ("A namespace without an operator", "aten::"),
    "python_as_operator": ("A listed function in the place of an operator", f"{VICTIM}:look"),
    "dotted_function": ("A listed function as torch names its own", f"{VICTIM}.look"),
    "set_data": (
        "An operator that changes any tensor's memory",
        "aten::set_.source_Storage_storage_offset",
    ),
}

_SCRIPTS = {
    "script": ("A script function that is not there", "__torch__.nothing"),
    "script_module_class": ("A class in the place of a script function", f"__torch__.{VICTIM}.Box"),
    "python_as_script": ("A listed function in the place of a script function", f"{VICTIM}.look"),
}


def _note(kind: int, table: dict[str, tuple[str, str]]) -> None:
    for name, (idea, called) in table.items():

        def run(attacker: Attacker, called: str = called) -> object:
            return attacker.call(called, kind=kind)

        run.__name__ = name
        attack(idea, REFUSED)(run)


_note(Kind.CALL_PYTHON, _PYTHON)
_note(Kind.CALL_BUILTIN, _OPERATORS)
_note(Kind.CALL_SCRIPT, _SCRIPTS)


@attack("Bytes that are no UTF-8", f"{REFUSED}|UnicodeDecodeError")
def no_text(attacker: Attacker) -> object:
    return attacker.call(b"\xff\xfe:\x80")


@attack(
    "A function without a name, and data for arguments",
    f"{REFUSED}|importable name|data only|without a name",
)
def unnamed(attacker: Attacker) -> object:
    return attacker.call("", b"\x90")


@attack("A name of 64 KiB is announced, and cut off", "cut off")
def announced(attacker: Attacker) -> object:
    return attacker.request(Kind.CALL_PYTHON, COUNT.pack(65535) + b"os:system")


@attack("No room for the length of a name", "without a name|cut off")
def nothing(attacker: Attacker) -> object:
    return attacker.request(Kind.CALL_PYTHON, b"\1")


@attack("A call whose result stays, without its numbers", "cut off|FrameError")
def remote_nothing(attacker: Attacker) -> object:
    return attacker.request(Kind.REMOTE_PYTHON, b"\1\2\3")


@attack("An unlisted function whose result stays", REFUSED)
def remote_unlisted(attacker: Attacker) -> object:
    prefix = struct.pack(
        "<QQ", attacker.agent.references.store.make_id(), attacker.agent.references.store.make_id()
    )
    return attacker.call("tests.rpc.attacks.canary:fire", kind=Kind.REMOTE_PYTHON, prefix=prefix)


@attack("A kind of request that there is not", "unknown kind")
def unknown_request(attacker: Attacker) -> object:
    return attacker.request(31, b"\0" * 8)


@attack("A kind of one-way message that there is not", "unknown kind")
def unknown_one_way(attacker: Attacker) -> None:
    attacker.send(255, b"\0" * 8)
