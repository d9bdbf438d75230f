"""eager_receives, incoming, payload_receives → transport: messages that nobody has asked for, as RPC sends them."""
