"""p2p → direct_messages, posted_receives → MPI: messages of tensors and objects."""
