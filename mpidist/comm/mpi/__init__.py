"""MPI without tensors: library → world → runtime → communicator. Importing starts nothing."""
