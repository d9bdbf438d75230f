"""Attacks on a worker that was started with a list of what others may call."""
