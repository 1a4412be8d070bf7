"""A model of time: what a service of so many targets and drafts yields, before it exists. Torch-free, no clocks."""
