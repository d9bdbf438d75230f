"""Algorithms of collectives: reduce_op → movement, reductions → device_collectives."""
