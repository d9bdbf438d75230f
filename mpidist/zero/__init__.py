"""Sharded optimizer (ZeRO-1): each rank keeps the state, and takes the step, of its shard of the parameters.

``partition`` (pure: parameters → owners) → ``buffer_plan`` (pure: owners → places in flat buffers)
→ ``flat_buffers`` (the parameters lie there) → ``pieces`` (what the base optimizer steps) →
``optimizer``.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
arXiv:1910.02054, §5.1.
"""
