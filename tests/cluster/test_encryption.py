"""A router and the proxies before it agree about TLS, or the router does not start."""

import json

import pytest

from paceline.cluster.encryption import encrypt_ingress, tls_settings
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.security import haproxy

FILES = {"certificate": "/c", "key": "/k"}
WITH = ServiceConfig.parse({"server": {"tls": FILES}})


def test_a_router_starts_only_where_the_proxies_encrypt_as_it_expects(monkeypatch):
    monkeypatch.delenv(haproxy.SETTINGS, raising=False)
    encrypt_ingress(ServiceConfig(), {})
    other = json.dumps({"server": FILES | {"client_ca": "/ca"}})
    for value in (None, "{}", other, "[]", "{"):
        if value is not None:
            monkeypatch.setenv(haproxy.SETTINGS, value)
        with pytest.raises(ConfigError, match="PACELINE_TLS"):
            encrypt_ingress(WITH, {})
    for value in (haproxy.encode(*tls_settings(WITH)), json.dumps({"server": FILES})):
        monkeypatch.setenv(haproxy.SETTINGS, value)
        with pytest.raises(KeyError, match="server"):  # they agree: the certificate is asked for
            encrypt_ingress(WITH, {})


def test_the_environment_of_a_configuration_is_the_one_that_its_routers_expect(monkeypatch):
    config = ServiceConfig.parse({"server": {"tls": FILES}, "internal_tls": FILES | {"ca": "/ca"}})
    variables = haproxy.tls_environment(*tls_settings(config))
    monkeypatch.setenv(haproxy.SETTINGS, variables[haproxy.SETTINGS])
    with pytest.raises(KeyError, match="server"):
        encrypt_ingress(config, {})
