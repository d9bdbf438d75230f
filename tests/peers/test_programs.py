"""Programs as data: edits, and the lines that they change."""

import pytest

from tests.peers import programs
from tests.peers.programs import Edit, EditError, changed_lines, edited, starts_of_processes


def test_edits_replace_whole_patterns():
    text = "size = 120\nmp.spawn(run)\n"
    edits = [Edit("main.py", r"^size = \d+", "size = 8"), Edit("main.py", r"^mp.*\n", "")]
    assert edited(text, edits) == "size = 8\n"


def test_an_edit_without_a_place_is_an_error():
    with pytest.raises(EditError, match=r"main\.py has nothing like 'absent'"):
        edited("size = 1\n", [Edit("main.py", "absent", "")])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("a\nb\nc\n", "a\nb\nc\n", 0),
        ("a\nb\nc\n", "a\nx\nc\n", 1),
        ("a\nb\nc\n", "a\nc\n", 1),
        ("a\nb\n", "a\nx\ny\nb\n", 2),
        ("a\nb\nc\nd\n", "x\nb\nc\ny\n", 2),
        # Lines that look like a diff's own heads.
        ("--a\n++b\n", "--x\n++b\n", 1),
    ],
)
def test_changed_lines(before, after, expected):
    assert changed_lines(before, after) == expected


def test_starts_of_processes():
    text = (
        "mp.spawn(run, nprocs=2)\nfor p in mp.Process(target=run), Process(): p.start()\nspawned()"
    )
    assert starts_of_processes(text) == 3


def test_names_are_distinct():
    names = [
        program.name
        for suite in (programs.EXAMPLES, programs.NANOGPT, programs.ACCELERATE, programs.VISION)
        for program in suite
    ]
    assert len(set(names)) == len(names)
