"""What stands between a client and the engines: the session relay."""
