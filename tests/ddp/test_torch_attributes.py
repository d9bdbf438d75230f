"""What programs read of torch's ``DistributedDataParallel`` beside its documentation."""

import warnings

import pytest
import torch
from torch.torch_version import TorchVersion

from mpidist.ddp.module import DistributedDataParallel
from tests.support import agree

pytestmark = pytest.mark.mpi


class Fails(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError


def test_parameters_that_are_ignored_are_no_data_parallel_ones(group):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    DistributedDataParallel(module, process_group=group)
    names = [name for name, _ in DistributedDataParallel._get_data_parallel_params(module, named_params=True)]
    parameters = list(DistributedDataParallel._get_data_parallel_params(module))
    agree(group, names == ["0.bias", "1.weight", "1.bias"], str(names))
    agree(group, [id(p) for p in parameters] == [id(p) for p in list(module.parameters())[1:]])


def test_a_module_is_wrapped_anew_after_a_pass_that_failed(group):
    module = torch.nn.Linear(3, 2)
    first = DistributedDataParallel(module, process_group=group)
    x = torch.full((1, 3), float(group.rank), requires_grad=True)
    with pytest.raises(ArithmeticError):
        first(Fails.apply(x)).sum().backward()
    first._remove_autograd_hooks()
    module.zero_grad()
    DistributedDataParallel(module, process_group=group)(x).sum().backward()
    want = torch.full((2, 3), (group.size - 1) / 2)
    agree(group, torch.equal(module.weight.grad, want), f"expected {want}, got {module.weight.grad}")


def test_caps_in_bytes_and_the_rank_whose_weights_held(group):
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, bucket_cap_mb_list=[1, 0.5])
    agree(group, (ddp.bucket_bytes_cap_list, ddp.bucket_bytes_cap) == ([2**20, 2**19], 2**20))
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    agree(group, (ddp.bucket_bytes_cap_list, ddp.bucket_bytes_cap, ddp.broadcast_bucket_size) == ([], 25 * 2**20, 250 * 2**20))
    with ddp.join():
        for _ in range(group.rank + 1):
            ddp(torch.ones(1, 3)).sum().backward()
    agree(group, ddp._authoritative_rank == group.size - 1, str(ddp._authoritative_rank))


def test_ranks_that_end_early_are_told_in_the_words_of_torchs_join(group):
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    text = ""
    try:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(1 if group.rank == 0 else 3):
                ddp(torch.ones(1, 3)).sum().backward()
    except RuntimeError as error:
        text = str(error)
    want = "Rank 0 exhausted all inputs" if group.rank == 0 else "Detected at least one rank that exhausted inputs."
    agree(group, (want in text) or group.size == 1, text)


def test_broadcast_buffers_is_deprecated_where_it_is_in_torch(group):
    def warned(**options) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, **options)
        return any(issubclass(w.category, FutureWarning) and "broadcast_buffers" in str(w.message) for w in caught)

    is_deprecated = TorchVersion(torch.__version__) >= "2.13"
    agree(group, warned(broadcast_buffers=True) is is_deprecated)
    agree(group, not warned() and not warned(forward_sync_buffers=False))
