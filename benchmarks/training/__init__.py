"""Training steps: models, one run of all contenders, report."""
