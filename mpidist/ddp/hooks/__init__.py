"""Communication hooks: GradBucket → future of the reduced bucket."""
