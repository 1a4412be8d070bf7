"""Certificates by the files that hold them, PEM each. The files are read where they are used, and again when they
change: here stands only where they are.
"""

from __future__ import annotations

from pydantic import Field

from paceline.config.base import Strict


class ServerTls(Strict):
    """TLS at the public ports: gRPC, and HTTP unless ``http`` is off."""

    certificate: str = Field(min_length=1)
    """PEM file: the service's certificate, then the intermediate ones up to the authority."""
    key: str = Field(min_length=1)
    """PEM file: the private key of the certificate, without a passphrase."""
    client_ca: str | None = Field(default=None, min_length=1)
    """PEM file: the authorities that clients' certificates are checked against; gRPC clients without one are refused.
    None: clients need no certificate."""
    http: bool = True
    """Use TLS on the HTTP port, too, without client certificates. False: that port serves only metrics and
    health."""


class InternalTls(Strict):
    """Mutual TLS between proxies, routers, targets and drafts: each shows its certificate and checks the other's."""

    certificate: str = Field(min_length=1)
    """PEM file: the certificate of every process of the service, for client and for server use."""
    key: str = Field(min_length=1)
    """PEM file: the private key of the certificate, without a passphrase."""
    ca: str = Field(min_length=1)
    """PEM file: the authority that signs the certificates of this service, and no others."""
    server_name: str = Field(default="internal.paceline", min_length=1)
    """DNS name in every certificate, since replicas have no names of their own and their addresses change."""
