"""``paceline bench compare``: configurations that answer the same requests in turn, as a file says."""
