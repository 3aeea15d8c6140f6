"""Engines behind Ray Serve: replicas, and prompts that go where their beginning is cached.

Owns the deployments and the way of a request between them. Only this package imports Ray. Knows nothing of
how an engine answers: a replica runs the same application as ``ingot serve``.

    serve run examples/ray/serve.yaml
"""
