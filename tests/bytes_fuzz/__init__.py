"""Hostile bytes for whatever reads bytes of others: ``python -m tests.bytes_fuzz --count 1000000 --seed 0``.

A target is a module of this package with ``samples() -> list[bytes]`` (valid cases),
``check(case)`` (raises what is wrong with how a case was read) and, if it has one,
``cases(samples)`` (a strategy of hypothesis) and ``IMPORTS`` (``guard``).
"""
