"""Certificates and API keys, before anything starts: every file is there, sound, and belongs to the others."""

from __future__ import annotations

from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.preflight.findings import Finding, Severity
from paceline.security.certificates import CertificateFiles, read_identity
from paceline.security.keys import KeyRing

_LOCAL = ("localhost", "::1")


def check_access(config: ServiceConfig) -> list[Finding]:
    """An error for each part that cannot be used."""
    server, internal = config.server, config.internal_tls
    parts = []
    if (tls := server.tls) is not None:
        parts.append(CertificateFiles.at("server.tls", tls.certificate, tls.key, tls.client_ca, "client_ca"))
    if internal is not None:
        parts.append(CertificateFiles.at("internal_tls", internal.certificate, internal.key, internal.ca))
    findings = []
    for part in parts:
        try:
            read_identity(part)
        except ConfigError as error:
            findings.append(Finding(Severity.ERROR, part.setting, str(error)))
    if server.api_keys is not None:
        try:
            KeyRing(server.api_keys)
        except ConfigError as error:
            findings.append(Finding(Severity.ERROR, "server.api_keys", str(error)))
    return findings


def check_exposure(config: ServiceConfig) -> list[Finding]:
    """A warning where strangers may call, or listen."""
    server, findings = config.server, []
    missing = [name for name, value in (("API keys", server.api_keys), ("TLS", server.tls)) if value is None]
    if missing and server.host not in _LOCAL and not server.host.startswith("127."):
        problem = f"is {server.host!r}: the service listens beyond this machine without {' and without '.join(missing)}"
        findings.append(Finding.warning("server.host", problem))
    return findings
