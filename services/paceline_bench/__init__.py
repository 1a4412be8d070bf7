"""``paceline bench``: measures the modes, a service, other servers, and reports on them."""
