"""`meshdsl play`: a page on this machine that shows what comes of a program while it is edited."""
