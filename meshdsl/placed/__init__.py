"""The placed program: where every tensor is split, whole or partial, and the reshards between."""
