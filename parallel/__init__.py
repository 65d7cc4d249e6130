"""How ranks cooperate: shard arithmetic, process groups, parallel layers, checkpoint slices, the step channel."""
