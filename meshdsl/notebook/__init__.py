"""meshdsl in notebooks: `%load_ext meshdsl`, `%%mdsl` cells, and what objects look like there."""
