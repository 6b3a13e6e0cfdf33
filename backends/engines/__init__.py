"""Running a program: threads of this process, torchrun, and the reference that checks both."""
