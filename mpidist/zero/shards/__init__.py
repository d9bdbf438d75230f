"""Shards of the parameters: owners, flat buffers, and the pieces that each rank steps."""
