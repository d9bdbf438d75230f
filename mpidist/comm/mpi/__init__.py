"""library → runtime → communicator: MPI as mpidist calls it, without tensors.

Importing it starts nothing.
"""
