"""Which layout is best: the spaces that are searched, the methods, and what they prove."""
