"""Command line: mpidist doctor, run, bench, tune, submit."""
