"""arguments → operation → execution → progress: a group's operations, one at a time, in order."""
