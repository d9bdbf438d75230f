"""plan → layout → bucket: gradients in flat memory; of their owners, in buffers that rotate."""
