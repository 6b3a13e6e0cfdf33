"""Text from a language model: its program of one step, run token after token."""
