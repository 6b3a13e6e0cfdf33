"""The torch program that every device runs: its text, statement by statement."""
