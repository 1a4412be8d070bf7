"""Tools for benchmarks: stand-ins for large weights."""
