"""Pipelines: programs whose loop is on the stages of an axis, against the same on one device."""
