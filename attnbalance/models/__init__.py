"""Models whose attention rows can be read."""
