"""Forked children leave what they inherit to their parent."""

import os

from mpidist.comm.mpi import forked_child


class Owner:
    """An object that notes where it was left."""

    def __init__(self):
        self.left = []

    def leave_to_parent(self):
        self.left.append(os.getpid())


def test_each_child_leaves_what_still_exists_once_and_the_parent_nothing():
    owner, dropped = Owner(), Owner()
    for each in (owner, owner, dropped):
        forked_child.register(each)
    left = dropped.left
    del dropped, each
    child = os.fork()
    if child == 0:
        os._exit(0 if owner.left == [os.getpid()] and not left else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0 and owner.left == []
