"""Confidence intervals by bootstrap and score tests; numpy and scipy only."""
