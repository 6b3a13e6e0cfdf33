"""The command line, as in `tests/cli`."""

from tests.cli.conftest import cli

__all__ = ["cli"]
