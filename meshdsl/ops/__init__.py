"""The operators: one record for each, which every pass reads."""
