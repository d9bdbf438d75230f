"""Steps of the sharded optimizer: when they are taken, what precedes them, the gather behind."""
