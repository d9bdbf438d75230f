"""frameworks → ddp, comm: strategies and environments for frameworks that admit such; none is imported before its module is."""
