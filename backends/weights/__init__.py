"""Parameters in the files of other programs: read and written as a block of weights says."""
