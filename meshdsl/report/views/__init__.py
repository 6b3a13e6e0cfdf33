"""What plans are looked at by: text with `print`, pictures in a notebook."""
