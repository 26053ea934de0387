"""Sources of facts: one file for each dataset, one for a user's own files."""
