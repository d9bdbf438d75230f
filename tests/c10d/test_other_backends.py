"""Requirements of Gloo and NCCL in mixed groups."""

import pytest
import torch
from torch.distributed import distributed_c10d

from mpidist.c10d.other_backends import obstacle, require_known


def test_a_backend_that_cannot_share_is_named():
    require_known({"cpu": "mpidist", "cuda": "nccl"})
    with pytest.raises(
        ValueError, match=r'"cpu:mpidist,cuda:ucc" asks.*new_group\(backend="ucc"\)'
    ):
        require_known({"cpu": "mpidist", "cuda": "ucc"})


def test_nccl_without_cuda_says_what_to_write(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("nccl", "nccl2", "nccl-lazy"):
        listed = {"cpu": "mpidist", "cuda": name}
        require_known(listed)
        for built, words in ((False, "was built without it"), (True, "no CUDA device")):
            monkeypatch.setattr(distributed_c10d, "is_nccl_available", lambda built=built: built)
            assert words in obstacle(listed) and 'backend="mpidist"' in obstacle(listed)


def test_gloo_needs_an_interface(monkeypatch):
    assert obstacle({"cpu": "gloo", "cuda": "mpidist"}) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert "Set GLOO_SOCKET_IFNAME to one of" in obstacle({"cpu": "gloo", "cuda": "mpidist"})
    assert obstacle({"cpu": "mpidist"}) is None
