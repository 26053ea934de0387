"""Whether models answer from the context or from memory."""
