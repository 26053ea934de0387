"""Sources of facts: PopQA and a user's own files, from the Hub or a local path."""
