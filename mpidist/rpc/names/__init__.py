"""Names in messages: a function → ``callee`` ⇝ ``callee``, ``services`` or ``allowlist`` → it."""
