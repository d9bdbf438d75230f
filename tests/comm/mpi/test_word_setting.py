"""Settings of one word: what a rank with an unknown word says."""

from mpidist.comm.mpi.word_setting import WordSetting

SETTING = WordSetting("MPIDIST_X", {"": 0, "off": 0, "on": 1}, ("'off'", "'on'"), "'on' or 'off'")


def test_the_rank_with_an_unknown_word_names_it(monkeypatch):
    monkeypatch.setenv("MPIDIST_X", "on")
    assert SETTING.code() == 1 and SETTING.problem([1, 1]) is None
    differs = "MPIDIST_X must be 'on' or 'off', the same on all ranks; it is "
    assert SETTING.problem([1, 0, 1]) == differs + "'off' on rank 1, 'on' on rank 0"
    assert SETTING.problem([1, 2]) == differs + "'on' on rank 0, another word on rank 1"
    monkeypatch.setenv("MPIDIST_X", "onn")
    assert SETTING.code() == 2
    assert SETTING.problem([2, 2]) == differs + "another word on rank 0; on this rank it is 'onn'"
    monkeypatch.delenv("MPIDIST_X")
    assert SETTING.code() == 0
