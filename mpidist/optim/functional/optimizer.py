"""Functional form of torch's optimizers: gradients are arguments; ``.grad`` is not used.

torch's optimizer works on aliases: tensors that share a parameter's memory and version counter and
have their own ``.grad``. So the arithmetic, the checks of arguments and the format of
``state_dict`` are torch's own. Steps call the unwrapped update, without decorators that import
``torch._dynamo`` at their first call (4 s on a cold disk, and 15 µs in each later step).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from mpidist import state_names, state_scalars
from mpidist.optim import fused, precision
from mpidist.optim.parameter_locks import ParameterLocks

Tensor = torch.Tensor

# torch's fused kernels are exact to rounding in these. In narrower dtypes that of SGD in torch 2.13
# is wrong from 16 elements on, and Adam's differ from the loop.
_FUSED = (torch.float32, torch.float64)

_add_param_group = inspect.unwrap(Optimizer.add_param_group)
_state_dict = inspect.unwrap(Optimizer.state_dict)
_load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class FunctionalOptimizer(Optimizer):
    """Optimizer with gradients as arguments of ``step``; a base class in front of torch's class.

    The arguments are those of torch's class. On the CPU a group uses the fused kernel if there is
    one and all its tensors are dense, contiguous and of float32 or float64, else the loop over
    parameters; on a CUDA device the foreach kernels. ``fused`` and ``foreach``, if given, override
    this choice. An ``eps`` that is 0 in a parameter's dtype gets a warning.

    Attributes:
        parameters: The parameters, in the order of the gradients of ``step``.
        locks: Held during a step; shared with all optimizers of one of these parameters.

    Raises:
        ValueError: No parameters, a non-leaf or repeated one, or ``differentiable=True``.
    """

    _of_torch: ClassVar[type[Optimizer]]
    _update: ClassVar[Callable[..., object]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._of_torch = cls.__mro__[cls.__mro__.index(FunctionalOptimizer) + 1]
        cls._update = staticmethod(inspect.unwrap(cls._of_torch.step))

    def __init__(self, params: ParamsT, *args: Any, **kwargs: Any) -> None:
        self.parameters: list[Tensor] = []
        self.locks = ParameterLocks()
        self._aliases: list[Tensor] = []
        # For each group, whether all its tensors are on the CPU, real and contiguous.
        self._contiguous: dict[int, bool] = {}
        super().__init__(params, *args, **kwargs)
        if self.defaults.get("differentiable"):
            raise ValueError(
                "a functional optimizer cannot be differentiated through: differentiable=True"
            )

    def _patch_step_function(self) -> None:
        # torch would wrap each step in a profiler event, a third of a small step's time.
        self._zero_grad_profile_name = ""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; as torch's."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        entries = param_group["params"]
        entries = [entries] if isinstance(entries, Tensor) else list(entries)
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in entries]
        new = [parameter for _, parameter in named]
        _check(new, self.parameters)
        aliases = [parameter.detach() for parameter in new]
        params = [
            alias if name is None else (name, alias)
            for (name, _), alias in zip(named, aliases, strict=True)
        ]
        _add_param_group(self, {**param_group, "params": params})
        self.locks.add(new)
        self.parameters += new
        self._aliases += aliases
        precision.warn_of_no_eps(self.param_groups[-1])
        self._contiguous.clear()

    def remove_last_group(self) -> None:
        """Remove the last added group and its state."""
        with self.locks:
            for alias in self.param_groups.pop()["params"]:
                self.state.pop(alias, None)
                self._aliases.pop()
                self.parameters.pop()
            self._contiguous.clear()

    def step(self, gradients: Sequence[Tensor | None]) -> None:  # type: ignore[override]
        """Update the parameters.

        Blocks: while another optimizer updates one of them. Does not wait for a CUDA stream.

        Args:
            gradients: One for each of ``parameters``, of its shape, dtype and device, or None: the
                parameter and its state do not change. Gradients are not changed.

        Raises:
            ValueError: Another number of gradients.
            RuntimeError: A gradient of another shape, dtype or device, or a sparse one for an
                optimizer that takes none.
        """
        if len(gradients) != len(self.parameters):
            raise ValueError(
                f"step needs {len(self.parameters)} gradients, one a parameter or None; got "
                f"{len(gradients)}"
            )
        with self.locks, torch.no_grad():
            try:
                for alias, parameter, gradient in zip(
                    self._aliases, self.parameters, gradients, strict=True
                ):
                    if not _has_same_memory(alias, parameter):
                        alias.data = parameter.data
                        self._contiguous.clear()
                    alias.grad = gradient if gradient is None else fused.laid_out(gradient, alias)
                self._run()
            finally:
                for alias in self._aliases:
                    alias.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no gradient outlives a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's optimizer of the same name, which loads it."""
        state: dict[str, Any] = _state_dict(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of torch's of the same name.

        Raises:
            ValueError: A state of another shape than its parameter, or one that lacks a name, or a
                group that lacks a setting; nothing is loaded.
        """
        with self.locks:
            state_names.require_complete(
                self._of_torch, self.defaults, state_dict["param_groups"], state_dict["state"]
            )
            _check_state(state_dict, self._aliases)
            _load_state_dict(self, state_dict)
            state_scalars.restore(self, state_dict)
            # Fused kernels need the same strides in a parameter and its state.
            for alias, state in self.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == alias.shape:
                        state[name] = fused.laid_out(value, alias)

    def _run(self) -> None:
        """Update the parameters, with fused kernels in the groups that allow them."""
        chosen = [
            number
            for number, group in enumerate(self.param_groups)
            if self._may_fuse(number, group)
        ]
        for group in self.param_groups:
            if group.get("fused"):
                fused.require_dense(group["params"])
        for number in chosen:
            self.param_groups[number]["fused"] = True
        try:
            self._update(self)
        finally:
            # Fused kernels do not increment version counters, which a backward pass checks for
            # changes of saved tensors.
            for group in self.param_groups:
                if group.get("fused"):
                    torch.autograd.graph.increment_version(
                        [alias for alias in group["params"] if alias.grad is not None]
                    )
            for number in chosen:
                self.param_groups[number]["fused"] = None

    def _may_fuse(self, number: int, group: dict[str, Any]) -> bool:
        if group.get("fused", False) is not None or group["foreach"] is not None:
            return False
        if group.get("capturable") or isinstance(group["lr"], Tensor):
            return False
        is_contiguous = self._contiguous.get(number)
        if is_contiguous is None:
            is_contiguous = self._contiguous[number] = all(map(_is_contiguous, group["params"]))
        used = (
            [(alias, alias.grad) for alias in group["params"] if alias.grad is not None]
            if is_contiguous
            else []
        )
        # Fused SGD needs momenta for all parameters or none; here some may have none yet.
        if group.get("momentum") and len({bool(self.state.get(alias)) for alias, _ in used}) > 1:
            return False
        return bool(used) and all(gradient.layout is torch.strided for _, gradient in used)


def _check(new: Sequence[object], present: Iterable[Tensor]) -> None:
    seen = {id(parameter) for parameter in present}
    for parameter in new:
        if not isinstance(parameter, Tensor):
            raise TypeError(
                "optimizer can only optimize Tensors, but one of the params is "
                f"{torch.typename(parameter)}"
            )
        if not parameter.is_leaf:
            raise ValueError("can't optimize a non-leaf Tensor")
        if id(parameter) in seen:
            raise ValueError(
                "some parameters appear in more than one parameter group, or twice in one"
            )
        seen.add(id(parameter))


def _check_state(state_dict: Mapping[str, Any], aliases: Sequence[Tensor]) -> None:
    """Refuse tensors of another shape than the parameter."""
    # torch's fused kernels would read and write beyond their memory.
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = state_dict["state"]
    # torch itself refuses another number of parameters.
    for number, alias in zip(numbers, aliases, strict=False):
        for name, value in state.get(number, {}).items():
            if isinstance(value, Tensor):
                fused.require_state(name, value, alias)


def _has_same_memory(alias: Tensor, parameter: Tensor) -> bool:
    # Assigning to a parameter's .data, as Module.to does, gives it other memory.
    return (
        alias.dtype is parameter.dtype
        and alias.device == parameter.device
        and alias.is_set_to(parameter)
    )


def _is_contiguous(alias: Tensor) -> bool:
    return alias.device.type == "cpu" and alias.dtype in _FUSED and alias.is_contiguous()
