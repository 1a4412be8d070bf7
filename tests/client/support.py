"""What the tests of both clients share: a call of either, and the text that the fake service sends."""

import asyncio

import pytest
from tests.support.fake_service import WORDS

from paceline.client import AsyncClient, Client

TEXT = "".join(WORDS)


def blocking(address, *args, **kwargs):
    """Chunks and result from the blocking client."""
    with Client(address) as client:
        stream = client.generate(*args, **kwargs)
        return list(stream), stream.result


def awaited(address, *args, **kwargs):
    """Chunks and result from the client for asyncio."""

    async def main():
        async with AsyncClient(address) as client:
            stream = client.generate(*args, **kwargs)
            chunks = [chunk async for chunk in stream]
            return chunks, await stream.result

    return asyncio.run(main())


both = pytest.mark.parametrize("generate", [blocking, awaited])
