"""Functions that are pasted as text into the programs that need them."""
