"""The OpenAI-compatible edge: HTTP and JSON in, requests to the same service that gRPC asks.

    body ─▶ schema ─▶ Request ─▶ Service.run (a router, or the one-process pipeline) ─▶ chunks ─▶ JSON or events

Knows neither Ray nor engines. ``app.py`` makes the ASGI application that the ingress and ``paceline serve --local``
mount.
"""
