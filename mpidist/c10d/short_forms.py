"""Short forms of torch's collective methods: one tensor for a list, values for an options object.

In C++ ``allreduce(tensor, op=..., timeout=...)`` is an overload of ``allreduce(tensors, opts)``.
Programs call either; torch's Join gives the map of used parameters as one tensor. A method in
Python gets what stands in the call, and looks at the class of its options: it is another one in
each short form.

Source: torch/csrc/distributed/c10d/init.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


class _Form(NamedTuple):
    """Short form of one method.

    Attributes:
        tensors: Number of arguments with tensors, right behind which the options stand.
        options: Class of the options object.
        values: Its values by name, in their order as arguments.
        single: Place of the argument that is one tensor in the short form, among those with
            tensors; the others lack the outer of two lists. None: they are the same in both.
    """

    tensors: int
    options: type
    values: tuple[str, ...]
    single: int | None = None


_FORMS = {
    "allreduce": _Form(1, c10d.AllreduceOptions, ("op", "timeout"), 0),
    "reduce": _Form(1, c10d.ReduceOptions, ("root", "op", "timeout"), 0),
    "reduce_scatter": _Form(2, c10d.ReduceScatterOptions, ("op", "timeout"), 0),
    "broadcast": _Form(1, c10d.BroadcastOptions, ("root", "timeout"), 0),
    "allgather": _Form(2, c10d.AllgatherOptions, ("timeout",), 1),
    "gather": _Form(2, c10d.GatherOptions, ("root", "timeout"), 1),
    "scatter": _Form(2, c10d.ScatterOptions, ("root", "timeout"), 0),
    "all_to_all_single": _Form(4, c10d.AllToAllOptions, ("timeout",)),
    "barrier": _Form(0, c10d.BarrierOptions, ("timeout",)),
}


def full(
    method: str,
    tensors: tuple[Any, ...],
    first: Any,
    rest: Sequence[Any] = (),
    named: Mapping[str, Any] | None = None,
) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of a method's full form: those with tensors, and the options.

    Args:
        method: Its name.
        tensors: Its arguments with tensors, in either form.
        first: The argument behind them: the options, the first of their values, or None.
        rest: Further values, in their order.
        named: Values by name.

    Raises:
        TypeError: A value that the method does not have.
    """
    form = _FORMS[method]
    if form.single is not None and isinstance(tensors[form.single], Tensor):
        tensors = tuple([[argument] for argument in tensors])
    given = () if first is None and not rest else (first, *rest)
    if given and hasattr(first, "timeout"):  # options, which only values follow by mistake
        options, given = first, given[1:]
        if given or named:
            raise TypeError(f"{method} takes an options object or its values, not both")
        return tensors, options
    if len(given) > len(form.values):
        raise TypeError(
            f"{method} takes {', '.join(form.values)} behind its tensors; got {len(given)} values"
        )
    options = form.options()
    for name, value in (*zip(form.values, given, strict=False), *(named or {}).items()):
        if name not in form.values:
            raise TypeError(f"{method} has no argument {name!r}; it has {', '.join(form.values)}")
        if value is not None:
            setattr(options, _FIELDS[name], value)
    return tensors, options


def in_full(method: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments of a call in the method's full form, where it has a short one."""
    form = _FORMS.get(method)
    if form is None:
        # torch names an argument where it is the only one.
        return (*args, *named.values())
    values = dict(named)
    first = args[form.tensors] if len(args) > form.tensors else values.pop("opts", None)
    tensors, options = full(method, args[: form.tensors], first, args[form.tensors + 1 :], values)
    return (*tensors, options)
