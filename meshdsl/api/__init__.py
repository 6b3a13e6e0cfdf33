"""The embedded language: the same programs from Python, through `import meshdsl as md`."""
