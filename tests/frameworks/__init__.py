"""Jobs of two ranks in which a framework trains: programs, and tests of their reports."""
