"""`knowledge`: which facts models know, and how surely."""
