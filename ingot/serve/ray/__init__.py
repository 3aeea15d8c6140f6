"""Engines behind Ray Serve: replicas, and prompts that go where their beginning is cached.

Covers the deployments and the way of a request between them. Only this package imports Ray.

    serve run examples/ray/serve.yaml
"""
