"""Attacks on a worker with a list."""
