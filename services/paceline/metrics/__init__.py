"""Every metric of the service, declared once, and the objects through which the processes count.

Names that begin with ``vllm:`` are vLLM's, with its meaning and its histogram bounds, so that the tools which
read them (``vllm bench serve``, dashboards, planners) work unchanged; ``paceline_`` is what only this service has.
Events are counted here; readers derive rates.

    declaration, catalogue, engines   names, labels, units
    registry, mirror                  the metrics of one process (prometheus_client), mirrored to Ray's exporter
    router, replica                   the events of a router and of a replica
    tracing, engine_tracing           the same events as spans, for OpenTelemetry

The numbers of a process reach the fleet's sums as ``Registry.samples()`` (``fleet/monitor.py``). This package knows
neither sessions nor sockets.
"""
