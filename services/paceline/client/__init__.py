"""The blocking and the asyncio client of the public gRPC API."""

from paceline.client.client import AsyncClient as AsyncClient
from paceline.client.client import AsyncStream as AsyncStream
from paceline.client.client import Client as Client
from paceline.client.client import Stream as Stream
from paceline.client.client import Tls as Tls
