"""The import path of the service in every Serve config file: ``import_path: paceline.app:build``."""

from paceline.cluster.app import build as build
