"""An OpenAI-compatible server: one process for HTTP and text, and one for each engine."""
