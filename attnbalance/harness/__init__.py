"""Tasks for lm-evaluation-harness."""
