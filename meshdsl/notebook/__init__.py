"""meshdsl in notebooks: `%load_ext meshdsl`, `%%mdsl` cells, and views of plans."""
