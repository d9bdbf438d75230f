"""Requests to other workers: ``pending``, ``references`` → ``wire`` ⇝ ``reader`` → ``pending``."""
