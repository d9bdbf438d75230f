"""reduce_op → movement, reductions → device_collectives: collectives over contiguous memory, by MPI and by our own arithmetic."""
