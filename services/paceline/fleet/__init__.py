"""How many replicas each pool has: from what the engines report to a number that Ray Serve follows.

    reports ─▶ Signals ─▶ demand of each pool ─▶ Scaler ─▶ wanted ──▶ post ─▶ board ─▶ follow ─▶ replicas
    once a second         (in replicas)         (steady)              (in the controller of Ray Serve)

All but the last part is without Ray, gRPC and clock; it runs inside the monitor, which hears of everything anyway.
"""
