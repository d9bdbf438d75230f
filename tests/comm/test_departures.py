"""Which ranks have ended."""

from mpidist.comm import departures


def test_a_rank_has_ended_only_after_what_it_sent_has_had_time_to_arrive(monkeypatch):
    monkeypatch.setattr(departures, "_left", {})
    assert departures.ended((0, 1)) == () and not departures.have_left((0, 1)) and not departures.have_left(())
    departures.note(1)
    assert departures.among((0, 1)) == (1,) and departures.ended((0, 1)) == ()
    departures._left[1] -= departures.GRACE_S + 1
    departures.note(1)  # said twice, it has ended when it said so first
    assert departures.ended((0, 1)) == (1,) and departures.have_left((1,)) and not departures.have_left((0, 1))


def test_the_error_names_the_ranks():
    error = departures.failure("rank 0 of 3: recv", (1, 2))
    assert error.ranks == (1, 2)
    assert str(error) == "rank 0 of 3: recv waits for world ranks 1, 2, which came to the end of the program"
