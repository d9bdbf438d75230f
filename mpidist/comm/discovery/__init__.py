"""installed → transports, capability: what this machine's MPI library offers, also on devices."""
