"""`salience`: what models store about the subjects of facts."""
