"""Reports: a table for the terminal, text and JSON for files."""
