"""Pages on the wire: what is sent comes together again, and nothing else does."""

import pytest

from paceline.rpc import pages
from paceline.rpc.pages import Joined, parts_of
from paceline.v1.target_pb2 import PagesPart


def contents(count: int, size: int) -> list[bytes]:
    return [bytes((i + j) % 251 for j in range(size)) for i in range(count)]


@pytest.mark.parametrize("size", [1, 9, 10, 11, 37])
def test_pages_come_as_they_were_sent(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PART_BYTES", 10)
    sent = contents(5, size)
    joined = Joined(size, 5)
    parts = [PagesPart.FromString(part.SerializeToString()) for part in parts_of(sent)]
    assert [page for part in parts for page in joined.add(part)] == sent
    with pytest.raises(ValueError, match="has 10 bytes: 1 to 0 are expected"):
        joined.add(next(parts_of([b"0123456789"])))


def test_parts_end_anywhere() -> None:
    sent = contents(3, 8)
    whole = b"".join(sent)
    joined = Joined(8, 3)
    got = [joined.add(next(parts_of([piece]))) for piece in (whole[:3], whole[3:17], whole[17:])]
    assert got == [[], sent[:2], sent[2:]]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (PagesPart(), "has 0 bytes: 1 to 16 are expected"),
        (PagesPart(data=bytes(17)), "has 17 bytes"),
        (PagesPart(data=b"12345678", crc32=1), "its checksum is another"),
        (PagesPart(data=b"12345678"), "its checksum is another"),
    ],
)
def test_what_was_not_sent_so_is_refused(part: PagesPart, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Joined(8, 2).add(part)


def test_a_part_is_bounded() -> None:
    joined = Joined(1 << 24, 1)
    with pytest.raises(ValueError, match="1 to 1048576 are expected"):
        joined.add(PagesPart(data=bytes(pages.PART_BYTES + 1)))
    assert [len(part.data) for part in parts_of([bytes(5 << 19)])] == [1 << 20, 1 << 20, 1 << 19]
