"""Objectives: the language they are written in, their terms, and the base model's numbers that terms compare with."""
