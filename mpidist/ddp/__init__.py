"""plan → bucket → reducer → hooks → comm: gradients to their average. In progress: ``join``, saving hooks, the demo."""
