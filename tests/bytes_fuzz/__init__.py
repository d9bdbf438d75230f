"""Fuzzing of readers of untrusted bytes: ``python -m tests.bytes_fuzz --count 1000000 --seed 0``.

A target is a module of this package with ``samples() -> list[bytes]`` (valid cases),
``check(case)`` (raises if a case is read wrongly) and optionally ``cases(samples)`` (a strategy of
hypothesis) and ``IMPORTS`` (``guard``).
"""
