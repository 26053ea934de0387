"""Folders of results: written whole, resumable, locked, sealed."""
