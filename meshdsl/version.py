"""The version, for whatever carries it: texts, checkpoints, kept plans."""

__version__ = "0.1.0"
