"""The operators: one record for each, which every station reads."""
