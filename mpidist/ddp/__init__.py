"""plan → bucket → reducer → hooks → comm: gradients to their average. So far the plan alone."""
