"""installed → transports, capability: the MPI library of this machine, what it offers and what it can do with device memory."""
