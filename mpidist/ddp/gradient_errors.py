"""Texts of errors about gradients that cannot be averaged."""

from __future__ import annotations

import torch


def wrong_layout(name: str, layout: torch.layout) -> str:
    """Return the text for a gradient of an unexpected layout."""
    if layout is torch.strided:
        return (
            f"the gradient of parameter {name!r} is dense, but its module announces sparse ones; a "
            "weight that other modules share needs sparse=False"
        )
    return (
        f"the gradient of parameter {name!r} has layout {layout}, but its module does not announce "
        "it; sparse gradients are averaged for nn.Embedding and nn.EmbeddingBag that have "
        "sparse=True when they are wrapped"
    )


def unused_before(name: str) -> str:
    """Return the text for a gradient of a parameter that is skipped as unused."""
    return (
        f"parameter {name!r} received a gradient, but no rank used it in the first backward pass; "
        "skip_all_reduce_unused_params needs the same unused parameters in all of them"
    )


def graph_changed(name: str, times: int, first: int) -> str:
    """Return the text for ``times`` additions in a static graph whose first pass had ``first``."""
    return (
        f"the gradient of parameter {name!r} arrived {times} times in one backward pass, and "
        f"{first} times in the first: the graph is not static. Leave static_graph=True out; "
        "parameters that only some passes use need find_unused_parameters=True"
    )


def added_twice(name: str) -> str:
    """Return the text for a second addition in one pass."""
    return (
        f"the gradient of parameter {name!r} arrived twice in one backward pass; a parameter that "
        "several checkpointed segments share needs static_graph=True, or checkpoint(..., "
        "use_reentrant=False)"
    )
