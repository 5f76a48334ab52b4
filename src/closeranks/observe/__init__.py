"""What goes on, for people: spans and watches. Imports no torch and nothing else of closeranks."""
