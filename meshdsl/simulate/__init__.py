"""A step in time: what every stream of a device does when, and how much memory it holds."""
