"""One data structure for the program at every stage: operators, loops and values."""
