"""Whether the record of an operator is right: its rules against each other, on small samples.

The operators of the language are tested with these functions, and `meshdsl prove` tries those of a
package with the same ones. Nothing else of the compiler imports this folder: it computes.
"""
