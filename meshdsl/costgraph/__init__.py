"""Graphs with costs: read from JSON or made by a search, and solved (`search --graph`)."""
