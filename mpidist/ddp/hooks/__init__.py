"""Communication hooks: GradBucket → future of the reduced bucket."""

from mpidist.ddp.hooks.owners import to_owners

__all__ = ["to_owners"]
