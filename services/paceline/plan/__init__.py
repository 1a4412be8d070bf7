"""A model of time: predicts the throughput of a service before it exists. Torch-free, no clocks."""
