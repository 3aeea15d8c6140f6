"""The chat page: Gradio in front of any OpenAI-compatible server."""
