"""The terminal: one file a verb; parse, call, print."""
