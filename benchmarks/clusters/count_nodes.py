"""Prints how many nodes of the cluster live; runs on one of them."""

import ray

ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
