"""Views of plans: text with `print`, pictures in a notebook."""
