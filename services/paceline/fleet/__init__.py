"""The number of replicas of each pool: from the reports of all processes to a number that Ray Serve follows.

    reports ─▶ Signals ─▶ demand of each pool ─▶ Scaler ─▶ size ────▶ post ─▶ board ─▶ follow ─▶ replicas
    once a second         (in replicas)         (steady)              (in the controller of Ray Serve)

All but the last part is free of Ray, gRPC and clocks; it runs inside the monitor, which receives every report.
"""
