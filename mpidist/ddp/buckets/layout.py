"""Layout of a module's gradients in buckets, rebuilt after the first backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, ne
from typing import TypedDict

import torch

from mpidist.comm.consistency import require_same
from mpidist.comm.group_types import Group
from mpidist.ddp.buckets import plan
from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.buckets.buffers import BucketAllocator
from mpidist.ddp.buckets.owned_bucket import Owners
from mpidist.ddp.buckets.settings import Settings

Tensor = torch.Tensor

_dtype_of = attrgetter("dtype")


class SavedPlan(TypedDict):
    """The buckets as plain values: lists of names, and whether they are rebuilt."""

    buckets: list[list[str]]
    is_rebuilt: bool


class Layout:
    """Buckets of one module's gradients on one group.

    Collective: constructed by all ranks of the group, unless ``local``.

    Args:
        expects_sparse: For each parameter whether its gradients are sparse; such a parameter has a
            bucket of its own.
        local: Use this rank's memory alone until ``rebuild``, and communicate nothing: for a copy
            of a module, which one rank alone may make.

    Attributes:
        plan: For each bucket the places of its parameters, in launch order.
        buckets: The buckets.
        views: For each place with dense gradients the memory of its averages in all passes: a part
            of a bucket, or memory of this rank for the elements that it owns.
        owners: Owners to which gradients are reduced, with buckets in rotating buffers; else None.
        sparse: Indices of the buckets of sparse gradients.
        is_rebuilt: The buckets stay as they are.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        expects_sparse: Sequence[bool],
        group: Group,
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
        # With unused parameters the ready order may change from pass to pass.
        self._follows_readiness = settings.static_graph or not settings.find_unused_parameters
        # Gradients become ready in the reverse order of use, which is about the order of
        # registration.
        self.plan = self._assign(list(reversed(range(len(parameters)))))
        self._allocate(local)
        self.is_rebuilt = not local and not self._follows_readiness

    def rebuild(self, ready_order: Sequence[int]) -> None:
        """Lay the buckets out in rank 0's ready order; existing gradients keep their values.

        Collective: over the group, at the end of the first backward pass.

        Args:
            ready_order: Places of the parameters in the order in which their gradients became
                ready; those without a gradient follow in the present order.
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

    def saved_plan(self) -> SavedPlan:
        """Return the buckets as lists of names, and whether they are rebuilt."""
        return {
            "buckets": [[self._names[place] for place in indices] for indices in self.plan],
            "is_rebuilt": self.is_rebuilt,
        }

    def load_plan(self, saved: SavedPlan) -> None:
        """Lay the buckets out as ``saved_plan()`` returned them.

        Collective: over the group.

        Raises:
            ValueError: The plan does not hold exactly this module's parameters, or a bucket has
                several dtypes, devices or layouts.
            DisagreementError: Another rank raised ValueError, or has other buckets.
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
            # Perhaps on this rank alone, because each rank may read a file of its own.
            problem = ValueError(
                "a bucket plan is what bucket_plan() returned; this one is damaged "
                f"({type(error).__name__})"
            )
        # The allocation is collective, so that all ranks must begin it with the same buckets.
        rows = [(f"bucket {index} of places", places) for index, places in enumerate(buckets)]
        require_same(self._group, "bucket plan", [("rebuilt", is_rebuilt), *rows], problem)
        self.plan = buckets
        self._allocate()
        self.is_rebuilt = is_rebuilt

    def follow_storage(self) -> None:
        """Renew views whose memory has been replaced since the last pass.

        ``module.double()`` and ``module.to()`` set the ``data`` of existing gradients, which are
        the views themselves.

        Raises:
            RuntimeError: A parameter has another dtype or device than its bucket.
        """
        dtypes = list(map(_dtype_of, self._parameters))
        devices = list(map(Tensor.get_device, self._parameters))
        if dtypes != self._dtypes or devices != self._devices:
            kinds = zip(self._names, dtypes, devices, self._dtypes, self._devices, strict=True)
            name, *now, dtype, device = next(kind for kind in kinds if kind[1:3] != kind[3:])
            raise RuntimeError(
                f"parameter {name!r} is now {now[0]} (device index {now[1]}), and was {dtype} "
                f"({device}) when its bucket was made: change dtype and device before the module "
                "is wrapped, or wrap it anew"
            )
        if any(map(ne, map(Tensor.data_ptr, self._attached), self._addresses)):
            for bucket in self.buckets:
                if isinstance(bucket, Bucket):
                    bucket.renew_views()
            self._attach_views()

    def use_owners(self, owners: Owners | None) -> None:
        """Lay the buckets out for gradients reduced to owners; None for averages on all ranks.

        Existing gradients keep their values, in memory of their own or as views of the new buckets.

        Collective: over the group, with the same owners.
        """
        for place, view in self.views.items() if self.owners is None else ():
            parameter = self._parameters[place]
            if parameter.grad is not None and self.holds(place, parameter.grad):
                parameter.grad = view.clone()
        self.owners = owners
        self._allocate()

    def holds(self, place: int, gradient: Tensor) -> bool:
        """Return whether a gradient is in the memory of a parameter's averages."""
        # Compared by address, because autograd may replace a view by another tensor on its memory.
        view = self.views.get(place)
        return (
            view is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == view.data_ptr()
        )

    def _places_of(self, names: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
        """Return buckets of names as buckets of places, after a check that the module fits."""
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
                raise ValueError(f"bucket {index} holds sparse gradients together with others")
        return buckets

    def _assign(self, places: Sequence[int]) -> list[tuple[int, ...]]:
        """Return a plan whose buckets are filled in this order."""
        planned = plan.assign(self._parameters, self._settings.limits, places, self._expects_sparse)
        if self._settings.most_buckets is not None:
            planned = plan.merge(
                self._parameters, planned, self._settings.most_buckets, self._expects_sparse
            )
        return planned

    def _allocate(self, local: bool = False) -> None:
        self._is_local = local
        self.sparse = frozenset(
            index for index, places in enumerate(self.plan) if self._expects_sparse[places[0]]
        )
        is_on_host = all(parameter.device.type == "cpu" for parameter in self._parameters)
        shares = is_on_host and not local
        allocator = BucketAllocator(self._parameters, self._names, self.plan, self.sparse)
        self.buckets = (
            allocator.separate(self._group, shares)
            if self.owners is None
            else allocator.rotating(self._group, self.owners, shares)
        )
        self._dtypes = list(map(_dtype_of, self._parameters))
        self._devices = list(map(Tensor.get_device, self._parameters))
        self._attached: list[Tensor] = []  # tensors that gradients may be
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
