"""stream → buffer: tensors as memory that MPI may touch, on the host and on devices."""
