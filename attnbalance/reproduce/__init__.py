"""The papers' figures and tables as commands: what was claimed, what is seen here, and how sure that is."""
