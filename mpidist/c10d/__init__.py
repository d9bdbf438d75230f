"""The adapter to ``torch.distributed`` (c10d): the backend ``mpidist``, its process groups and works under torch's names."""
