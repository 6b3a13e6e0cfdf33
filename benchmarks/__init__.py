"""Figures, measured side by side in one run. Never timed tests: machines are noisy."""
