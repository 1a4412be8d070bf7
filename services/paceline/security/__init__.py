"""Who may call what, and over which connections: API keys with limits, certificates, TLS at the public ports.

``certificates`` reads and reloads files; ``keys`` names the callers; ``access`` decides about each call; ``haproxy``
makes Serve's proxy speak TLS. Nothing here imports Ray or gRPC.
"""
