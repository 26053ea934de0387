"""Readings: numbers for each prompt, layer and head, and what is computed from them."""
