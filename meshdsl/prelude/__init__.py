"""Library functions written in `.mdsl`."""
