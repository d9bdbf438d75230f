"""Modules on other workers, with torch's names and meanings: ``torch.distributed.nn``."""

from mpidist.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
