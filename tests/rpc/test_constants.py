"""Defaults of RPC with torch's names; pure."""

from torch.distributed.rpc import constants as of_torch

from mpidist.rpc import constants


def test_defaults_are_torchs_where_torch_has_them():
    for name in ("DEFAULT_RPC_TIMEOUT_SEC", "DEFAULT_NUM_WORKER_THREADS", "UNSET_RPC_TIMEOUT"):
        assert getattr(constants, name) == getattr(of_torch, name), name
