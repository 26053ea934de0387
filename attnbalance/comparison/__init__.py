"""`curve`: several models measured on the same prompts, their readings and answers compared, with a report."""
