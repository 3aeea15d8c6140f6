"""Engines behind Ray Serve: replicas, and prompts that go where their beginning is cached."""
