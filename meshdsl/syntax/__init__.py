"""The syntax tree: parsing, formatting and the words of syntax errors."""
