"""Check for NaN in what a rank contributes: with ``TORCH_DIST_NAN_CHECK=1``.

A NaN of one rank is everywhere after the next reduction. With the variable set each rank looks at
floating-point tensors before it sends them, and the rank with a NaN raises: its traceback names
the call, and the job ends. An infinity passes, because scaled training expects it. The check reads
all elements, and for a device waits for its work.

Source: torch's variables for the same check, ``TORCH_DIST_NAN_CHECK`` (every backend, from 2.14 on)
and ``TORCH_NCCL_NAN_CHECK``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mpidist.errors import MpidistError

_VARIABLES = ("TORCH_DIST_NAN_CHECK", "TORCH_NCCL_NAN_CHECK")


def is_asked(environ: Mapping[str, str]) -> bool:
    """Return whether a variable asks for the check."""
    return any(environ.get(name) == "1" for name in _VARIABLES)


def require_none(where: str, tensors: Iterable[torch.Tensor]) -> None:
    """Look for NaN in the floating-point and complex tensors among these.

    Raises:
        MpidistError: There is one; the error has the count and the first place.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            tensor = tensor.detach()._values()
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        # isnan has no kernel for types of one byte.
        values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
        found = values.isnan()
        if found.any():
            count, first = int(found.sum()), int(found.flatten().to(torch.uint8).argmax())
            raise MpidistError(
                f"{where}: {count} of {found.numel()} elements of this rank's tensor (shape "
                f"{tuple(tensor.shape)}, {tensor.dtype}) are NaN, the first is element {first}"
            )
