"""Examples of help texts; pure. That they parse: ``test_command.py``."""

from mpidist.cli.help_examples import EXAMPLES, epilog


def test_one_example_is_singular():
    assert epilog("mpidist a") == "Example:\n\nmpidist a"
    assert epilog("mpidist a", "mpidist b") == "Examples:\n\nmpidist a\n\nmpidist b"


def test_each_example_has_its_subcommand():
    for name, lines in EXAMPLES.items():
        assert lines and all(f"mpidist {name}" in line for line in lines), name
