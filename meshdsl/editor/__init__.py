"""The language server: what an editor shows of a `.mdsl` file, and does to it."""
