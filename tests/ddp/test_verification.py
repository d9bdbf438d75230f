"""State of a module in comparisons: names, shapes, dtypes and, where gradients are, strides."""

import torch

from mpidist.ddp.verification import named_state, rows_of


def test_state_without_the_ignored_and_with_buffers_if_asked():
    module = torch.nn.BatchNorm1d(2)
    assert [name for name, _ in named_state(module, {"bias"}, False)] == ["weight"]
    assert [name for name, _ in named_state(module, {"bias", "running_var"}, True)] == [
        "weight",
        "running_mean",
        "num_batches_tracked",
    ]


def test_rows_say_what_must_be_equal():
    turned = torch.zeros(3, 2).t().requires_grad_()
    count = torch.zeros((), dtype=torch.int64)
    assert rows_of([("w", turned), ("n", count)]) == [
        ("w", "(2, 3) torch.float32 on cpu strides (1, 2)"),
        ("n", "() torch.int64 on cpu"),
    ]
