"""`python -m meshdsl` is the command `meshdsl`."""

from meshdsl.cli import main

if __name__ == "__main__":
    main()
