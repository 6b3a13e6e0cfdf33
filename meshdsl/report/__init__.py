"""What a user is shown about a program: JSON first, every other form drawn from it."""
