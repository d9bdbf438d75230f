"""Requests of other workers: ``dispatcher`` → ``requests`` → the function or method → an answer."""
