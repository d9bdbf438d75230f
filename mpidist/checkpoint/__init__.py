"""Checkpoints of a training run: written beside, checked by digest, renamed; loaded by any number of ranks."""
