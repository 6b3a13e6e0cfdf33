"""Parsers of printed programs, so that a pass can be tested on ten lines of text."""
