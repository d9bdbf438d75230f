"""Hooks that do not keep their owner."""

import weakref

from mpidist.ddp.buckets.weak_hook import weak_hook


class Owner:
    def __init__(self):
        self.seen = []

    def take(self, place, value):
        self.seen.append((place, value))


def test_the_method_is_called_until_the_owner_is_gone():
    owner = Owner()
    seen, hook, reference = owner.seen, weak_hook(owner, Owner.take), weakref.ref(owner)
    hook(1, "a")
    del owner
    assert reference() is None
    hook(2, "b")
    assert seen == [(1, "a")]
