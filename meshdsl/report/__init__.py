"""Reports on a program: facts as JSON first, documents for people made of them."""
