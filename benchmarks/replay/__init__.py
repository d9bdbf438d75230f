"""Replay of made traces of data-parallel steps on simulated networks."""
