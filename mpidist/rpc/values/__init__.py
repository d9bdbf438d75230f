"""Contents of messages: an object → ``codec`` ⇝ ``codec.Decoder`` → its copy."""
