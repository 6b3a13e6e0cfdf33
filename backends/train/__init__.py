"""Training: jobs, data, the loop, its checkpoints and its engines."""
