"""How a command reaches a running service over HTTP: its address, key and authorities, and the flags that say so."""

from __future__ import annotations

import argparse
import http.client
import os
import ssl
import urllib.request
from dataclasses import dataclass

from paceline.cli.flags import flag_of
from paceline.errors import ConfigError
from paceline.errors.refusals import is_http_url

_OF_ENGINES = (
    *("local", "target", "draft", "drafter", "head"),
    *("dtype", "compile", "background_compilation", "tensor_parallel_size", "cpu_threads", "placement"),
    *("max_model_len", "chat_template"),
)
_OF_SERVICES = ("api_key", "tls_ca")
CONNECT_S = 30.0
"""Seconds within which a connection must be made."""


def not_http(service: HttpService) -> ConfigError:
    """The refusal of a port that answers by another protocol, such as gRPC."""
    return ConfigError(
        f"the port at {service.url} does not speak HTTP: the service's HTTP port is needed, such as 8000"
    )


def require_http(service: HttpService) -> None:
    """Raises ConfigError for a port that answers by another protocol. One that does not answer may come back."""
    request = urllib.request.Request(f"{service.url}/ping", headers=service.headers)
    try:
        urllib.request.urlopen(request, timeout=CONNECT_S, context=service.tls).close()
    except http.client.RemoteDisconnected:
        return
    except http.client.BadStatusLine:
        raise not_http(service) from None
    except OSError:  # urllib.error.HTTPError is one
        return


@dataclass(frozen=True, slots=True)
class HttpService:
    """A service that is asked over HTTP."""

    url: str
    """Scheme, host and port."""
    headers: dict[str, str]
    """Sent with every request: the content type, and the key if there is one."""
    tls: ssl.SSLContext | None
    """None: the connection is not encrypted."""


def add_remote_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that ``service_of`` reads."""
    group = parser.add_argument_group("service")
    group.add_argument("--address", metavar="URL", help="[http://]HOST:PORT of a running service instead of --local")
    group.add_argument("--api-key", metavar="KEY", help="default: the environment variable PACELINE_API_KEY")
    group.add_argument("--tls-ca", metavar="FILE", help="the authorities of an https service, PEM")


def service_of(args: argparse.Namespace) -> HttpService | None:
    """The service of ``--address``; None: engines on this machine.

    Raises ConfigError for an address that is none, authorities that cannot be read, and flags of the other place.
    """
    place = "without" if args.address is None else "with"
    for name in _OF_SERVICES if args.address is None else _OF_ENGINES:
        if getattr(args, name) is not None:
            raise ConfigError(f"{flag_of(name)} is given {place} --address")
    if args.address is None:
        return None
    url = args.address.rstrip("/").removesuffix("/v1")
    if "://" not in url and url.rpartition(":")[2].isdecimal():
        url = f"http://{url}"
    if not is_http_url(url):
        raise ConfigError(f"--address is {args.address!r}: http://HOST:PORT or https://HOST:PORT is needed")
    encrypted = url.startswith("https:")
    if args.tls_ca is not None and not encrypted:
        raise ConfigError(f"--tls-ca is given, but --address is {args.address!r}, which is not encrypted")
    try:
        tls = ssl.create_default_context(cafile=args.tls_ca) if encrypted else None
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--tls-ca is {args.tls_ca!r}: it holds no certificates that can be read ({error})") from None
    key = args.api_key or os.environ.get("PACELINE_API_KEY")
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return HttpService(url, headers, tls)
