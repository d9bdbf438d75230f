"""The buckets of a module: planned from sizes, laid out in memory, and laid out once more after the first backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, ne
from typing import Any

import torch

from mpidist.comm.algorithms.shared_memory import share
from mpidist.ddp import plan
from mpidist.ddp.bucket import Bucket
from mpidist.ddp.buffer_rotation import RotatingBuffers
from mpidist.ddp.owned_bucket import OwnedBucket, Owners
from mpidist.ddp.sparse_bucket import SparseBucket
from mpidist.errors import DisagreementError

Tensor = torch.Tensor

_LINE_BYTES = 64
_dtype_of = attrgetter("dtype")


@dataclass(frozen=True)
class Settings:
    """Settings of a reducer and of its buckets."""

    limits: tuple[int, ...]  # bytes at which the first, the second, … bucket closes
    most_buckets: int | None = None  # merge neighbours until there are no more than these
    # gradients are views of the buckets; else they are copied back
    gradient_as_bucket_view: bool = True
    # parameters may lack a gradient, and not the same ones on all ranks
    find_unused_parameters: bool = False
    # which parameters are used, and how often, is as in the first backward pass
    static_graph: bool = False
    # buckets leave behind the last gradient: modules communicate in the backward pass themselves
    behind_all: bool = False
    # parameters that no rank used in the first backward pass are not reduced in the later ones
    skip_unused: bool = False


class Layout:
    """The buckets of one module's gradients on one group.

    Collective: constructed by all ranks of the group, unless it is ``local``.

    Args:
        expects_sparse: For each parameter whether its gradients are sparse; it gets a bucket of its
            own.
        local: Use memory of this rank alone until ``rebuild``, and communicate nothing: for a copy,
            which one rank may make.

    Attributes:
        plan: For each bucket the places of its parameters, in the order of launch.
        buckets: The buckets.
        views: For each place of a parameter with dense gradients the memory that its averages are
            in, pass after pass: its part of a bucket, or of what this rank keeps of those that it
            owns.
        owners: Where gradients leave to their owners, and buckets take turns in a few buffers; else
            None.
        sparse: The places, in ``plan``, of buckets of sparse gradients.
        is_rebuilt: The buckets stay as they are.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        expects_sparse: Sequence[bool],
        group: Any,
        settings: Settings,
        local: bool = False,
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._expects_sparse = expects_sparse
        self._group = group
        self._settings = settings
        self.owners: Owners | None = None
        self.views: dict[int, Tensor] = {}
        # Which parameters a pass uses, and so the order of their gradients, varies with unused
        # ones.
        self._follows_readiness = settings.static_graph or not settings.find_unused_parameters
        # Gradients come in the reverse order of use, which is about that of registration.
        self.plan = self._assign(list(reversed(range(len(parameters)))))
        self._allocate(local)
        self.is_rebuilt = not local and not self._follows_readiness

    def rebuild(self, ready_order: Sequence[int]) -> None:
        """Lay the buckets out in the order in which gradients arrive; those that exist keep their values.

        Collective: over the group, at the end of the first backward pass. Rank 0's order holds for
        all.

        Args:
            ready_order: Places of parameters in the order of arrival; those without a gradient are
                added in the present order.
        """
        planned = self.plan
        if self._follows_readiness:
            known = set(ready_order)
            rest = [place for indices in self.plan for place in indices if place not in known]
            order = torch.tensor([*ready_order, *rest], device="cpu")
            self._group.broadcast(order, 0)
            planned = self._assign(order.tolist())
        if planned != self.plan or self._is_local:
            self.plan = planned
            self._allocate()
        self.is_rebuilt = True

    def saved_plan(self) -> dict[str, Any]:
        """Return the buckets by names, and whether they stay."""
        return {
            "buckets": [[self._names[place] for place in indices] for indices in self.plan],
            "is_rebuilt": self.is_rebuilt,
        }

    def load_plan(self, saved: dict[str, Any]) -> None:
        """Lay the buckets out as ``saved_plan()`` said.

        Collective: over the group.

        Raises:
            ValueError: Not exactly this module's parameters, or a bucket of several dtypes, devices
                or layouts.
            DisagreementError: Another rank raised that, or has other buckets.
        """
        problem: ValueError | None = None
        buckets: list[tuple[int, ...]] = []
        is_rebuilt = False
        try:
            buckets = self._places_of(saved["buckets"])
            is_rebuilt = bool(saved["is_rebuilt"])
        except ValueError as error:
            problem = error
        except (AttributeError, LookupError, TypeError) as error:
            # On this rank alone, perhaps: each has a file of its own.
            problem = ValueError(
                "a bucket plan is what bucket_plan() returned; this one is damaged "
                f"({type(error).__name__})"
            )
        # Making them is collective, so all ranks have to begin it, with the same.
        told = self._group.all_gather_object(
            (buckets, is_rebuilt, None if problem is None else str(problem))
        )
        if problem is not None:
            raise problem
        if any(other != told[0] for other in told):
            wrong = "; ".join(
                f"rank {rank}: {text or f'{len(its)} buckets'}"
                for rank, (its, _, text) in enumerate(told)
            )
            raise DisagreementError(f"the bucket plans of the ranks differ. {wrong}")
        self.plan = buckets
        self._allocate()
        self.is_rebuilt = is_rebuilt

    def follow_storage(self) -> None:
        """Take back the views whose memory somebody has replaced since the last pass.

        ``module.double()``, ``.to()`` and the like set the ``data`` of gradients that exist, and
        those are our views themselves.

        Raises:
            RuntimeError: A parameter has another dtype or device than its bucket.
        """
        dtypes, devices = (
            list(map(_dtype_of, self._parameters)),
            list(map(Tensor.get_device, self._parameters)),
        )
        if dtypes != self._dtypes or devices != self._devices:
            now, then = (
                list(zip(dtypes, devices, strict=True)),
                list(zip(self._dtypes, self._devices, strict=True)),
            )
            place = next(place for place, kind in enumerate(now) if kind != then[place])
            raise RuntimeError(
                f"parameter {self._names[place]!r} is now {now[place][0]} (device index "
                f"{now[place][1]}), and was "
                f"{then[place][0]} ({then[place][1]}) when its bucket was made: change dtype and "
                "device before the module is "
                "wrapped, or wrap it anew"
            )
        if any(map(ne, map(Tensor.data_ptr, self._attached), self._addresses)):
            for bucket in self.buckets:
                if isinstance(bucket, Bucket):
                    bucket.renew_views()
            self._attach_views()

    def use_owners(self, owners: Owners | None) -> None:
        """Lay the buckets out for gradients that leave to owners, or for averages on all ranks (None).

        Gradients that exist keep their values, in memory of their own or as views of the new
        buckets.

        Collective: over the group, with the same owners.
        """
        for place, view in self.views.items() if self.owners is None else ():
            parameter = self._parameters[place]
            if parameter.grad is not None and self.holds(place, parameter.grad):
                parameter.grad = view.clone()
        self.owners = owners
        self._allocate()

    def holds(self, place: int, gradient: Tensor) -> bool:
        """Say whether a gradient lies in the memory of a parameter's averages."""
        # Compared by address, because autograd may replace a view by another tensor on its memory.
        view = self.views.get(place)
        return (
            view is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == view.data_ptr()
        )

    def _places_of(self, names: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
        """Turn buckets of names into buckets of places, if this module can have them."""
        buckets = plan.by_place(names, self._names)
        for index, places in enumerate(buckets):
            kinds = {
                (self._parameters[place].dtype, self._parameters[place].device) for place in places
            }
            if len(kinds) != 1:
                raise ValueError(
                    f"bucket {index} holds parameters of several dtypes or devices, or none"
                )
            if len(places) > 1 and any(self._expects_sparse[place] for place in places):
                raise ValueError(f"bucket {index} holds sparse gradients beside others")
        return buckets

    def _assign(self, places: Sequence[int]) -> list[tuple[int, ...]]:
        """Plan buckets that are filled in this order."""
        assigned = plan.assign(
            self._parameters, self._settings.limits, places, self._expects_sparse
        )
        if self._settings.most_buckets is not None:
            assigned = plan.merge(
                self._parameters, assigned, self._settings.most_buckets, self._expects_sparse
            )
        return [bucket.indices for bucket in assigned]

    def _allocate(self, local: bool = False) -> None:
        self._is_local = local
        self.sparse = frozenset(
            index for index, places in enumerate(self.plan) if self._expects_sparse[places[0]]
        )
        is_on_host = all(parameter.device.type == "cpu" for parameter in self._parameters)
        shares = is_on_host and not local
        self.buckets = (
            self._separate_buckets(shares)
            if self.owners is None
            else self._rotating_buckets(self.owners, shares)
        )
        self._dtypes = list(map(_dtype_of, self._parameters))
        self._devices = list(map(Tensor.get_device, self._parameters))
        self._attached: list[Tensor] = []  # what gradients may be
        self._addresses: list[int] = []
        if self.owners is not None:
            self.views = {} if self.owners.kept is None else self.owners.kept
        else:
            self._attach_views()

    def _attach_views(self) -> None:
        self.views = {}
        for bucket in self.buckets:
            self.views.update(zip(bucket.indices, bucket.views, strict=False))
            if self._settings.gradient_as_bucket_view:
                bucket.attach_gradients()
        self._attached = list(self.views.values())
        self._addresses = list(map(Tensor.data_ptr, self._attached))

    def _separate_buckets(self, shares: bool) -> list[Bucket | SparseBucket]:
        """Return the plan's buckets, the dense ones one behind the other in memory of the node, each from a cache line on."""
        needed = sum(
            self._aligned_bytes(places)
            for index, places in enumerate(self.plan)
            if index not in self.sparse
        )
        memory = share(self._group, needed) if shares else None
        buckets: list[Bucket | SparseBucket] = []
        start_bytes = 0
        for index, places in enumerate(self.plan):
            if index in self.sparse:
                buckets.append(self._sparse_bucket(places))
                continue
            node_tensor = None
            if memory is not None:
                numel = sum(self._parameters[place].numel() for place in places)
                node_tensor = (
                    memory.tensor(start_bytes, numel, self._parameters[places[0]].dtype)
                    if numel
                    else None
                )
                start_bytes += self._aligned_bytes(places)
            buckets.append(Bucket(places, self._parameters, self._names, node_tensor))
        return buckets

    def _rotating_buckets(self, owners: Owners, shares: bool) -> list[Bucket | SparseBucket]:
        """Return the plan's buckets, the dense ones of a device in turn in buffers of the biggest one's size."""
        dense = [index for index in range(len(self.plan)) if index not in self.sparse]
        sizes: dict[torch.device, list[int]] = {}
        for index in dense:
            sizes.setdefault(self._device_of(index), []).append(
                self._aligned_bytes(self.plan[index])
            )
        memories = {
            device: RotatingBuffers(self._group, device, held, owners.buffers, shares)
            for device, held in sizes.items()
        }
        first = dict(
            zip(
                memories,
                accumulate((memory.count for memory in memories.values()), initial=0),
                strict=False,
            )
        )
        buckets: list[Bucket | SparseBucket] = []
        placed: Counter[torch.device] = Counter()
        for index, places in enumerate(self.plan):
            if index in self.sparse:
                buckets.append(self._sparse_bucket(places))
                continue
            device = self._device_of(index)
            buffer = placed[device] % memories[device].count
            placed[device] += 1
            numel = sum(self._parameters[place].numel() for place in places)
            node_tensor, flat = memories[device].tensor(
                buffer, numel, self._parameters[places[0]].dtype
            )
            number = first[device] + buffer
            buckets.append(
                OwnedBucket(
                    places, self._parameters, self._names, node_tensor, flat, number, owners
                )
            )
        return buckets

    def _sparse_bucket(self, places: Sequence[int]) -> SparseBucket:
        return SparseBucket(places[0], self._parameters[places[0]], self._names[places[0]])

    def _device_of(self, index: int) -> torch.device:
        return self._parameters[self.plan[index][0]].device

    def _aligned_bytes(self, places: Sequence[int]) -> int:
        return (
            -(-sum(self._parameters[place].nbytes for place in places) // _LINE_BYTES) * _LINE_BYTES
        )
