"""Sharded optimizer (ZeRO-1): each rank keeps the state of its shard of the parameters.

``partition`` (pure: parameters → owners) → ``buffer_plan`` (pure: owners → places in flat buffers)
→ ``flat_buffers`` (memory of the parameters) → ``pieces`` (tensors of the base optimizer) →
``optimizer``.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
arXiv:1910.02054, §5.1.
"""
