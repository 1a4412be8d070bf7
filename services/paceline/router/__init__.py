"""The router between clients and engines: admission, placement and the relay of each session."""
