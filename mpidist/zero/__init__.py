"""Sharded optimizer (ZeRO-1): each rank keeps the state of its shard of the parameters.

``shards``: ``partition`` (pure: parameters → owners) → ``buffer_plan`` (pure: owners → places in
flat buffers) → ``flat_buffers`` (memory of the parameters) → ``pieces`` (tensors of the base
optimizer). ``state``: the base optimizer's on one rank, and the forms in which it is saved.
``step``: when steps are taken, and the gather behind them.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
arXiv:1910.02054, §5.1.
"""
