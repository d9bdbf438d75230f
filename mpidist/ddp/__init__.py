"""plan → bucket → reducer → hooks → comm: gradients to their average. In progress: the hooks are to come."""
