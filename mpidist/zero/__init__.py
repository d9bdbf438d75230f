"""Sharded optimizer (ZeRO-1)."""
