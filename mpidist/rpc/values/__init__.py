"""Contents of messages: an object → ``codec`` or ``data_codec`` ⇝ ``codec.Decoder`` → its copy."""
