"""Start of each process of a peer's program: Python imports this before the program's own file."""

from tests.peers import process_start

process_start.install()
