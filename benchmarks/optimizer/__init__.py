"""Sharded optimizers: cases, bytes of state, report."""
