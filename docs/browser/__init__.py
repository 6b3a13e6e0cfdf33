"""The page that needs no installation: `python -m docs.browser.build` (docs/browser.md)."""
