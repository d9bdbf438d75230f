"""eager_message → receives, incoming, loopback → transport: unexpected messages, used by RPC."""
