"""frameworks → ddp, comm: strategies and environments for frameworks, imported module by module."""
