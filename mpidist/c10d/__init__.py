"""Backend ``mpidist`` of ``torch.distributed`` (c10d): registration, process groups and works."""
