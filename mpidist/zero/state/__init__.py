"""State of the sharded optimizer: one rank's, and the forms in which it is saved and loaded."""
