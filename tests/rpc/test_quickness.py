"""Running times that decide where a request runs."""

from mpidist.rpc.quickness import Quickness, key_of


def test_quickness_is_learnt_and_forgotten_slowly():
    known = Quickness()
    assert not known.is_quick("f")
    known.note("f", 1e-5)
    assert known.is_quick("f")
    known.note("f", 1.0)
    turns = 0
    while not known.is_quick("f"):
        known.note("f", 1e-5)
        turns += 1
    assert 10 < turns < 60
    assert key_of(len, ()) == ("builtins", "len") and key_of(Quickness(), ()) is Quickness
