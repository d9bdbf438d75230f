"""Communicating modules with torch's names: ``RemoteModule`` and ``SyncBatchNorm``."""

from mpidist.nn.remote_module import RemoteModule
from mpidist.nn.sync_batch_norm import SyncBatchNorm

__all__ = ["RemoteModule", "SyncBatchNorm"]
