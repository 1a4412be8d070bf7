"""The memory of a compiled model's weights is packed into large pages, and stays what it is."""

import ctypes
import mmap
from pathlib import Path

import pytest

from paceline.model.compiled import package

SIZE = 24 << 20


def _huge_kb(address: int) -> int:
    """Kilobytes in huge pages of the mapping that holds ``address``."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        key, _, rest = line.partition(" ")
        if "-" in key and not key.endswith(":"):
            start, stop = (int(part, 16) for part in key.split("-"))
            here = start <= address < stop
        elif here and key == "AnonHugePages:":
            return int(rest.split()[0])
    return 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_large_memory_is_found_and_its_bytes_survive():
    before = set(package.large_mappings())
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pattern = bytes(range(251)) * (SIZE // 251) + bytes(SIZE % 251)
        memory.write(pattern)
        found = set(package.large_mappings()) - before
        holder = (ctypes.c_char * SIZE).from_buffer(memory)
        address = ctypes.addressof(holder)
        (span,) = [(start, stop) for start, stop in found if start <= address < stop]
        package._use_huge_pages(*span)
        assert memory[:] == pattern
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        if setting.exists() and "[never]" not in setting.read_text(encoding="utf-8"):
            assert _huge_kb(address) >= (SIZE >> 10) // 2
        del holder


def test_memory_without_a_whole_large_page_is_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(package.ctypes, "CDLL", asked.append)
    package._use_huge_pages(0x1000, 0x300000)
    assert not asked


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_neither_heap_nor_stacks_nor_files_are_touched():
    spans = set(package.large_mappings())
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, access, _, _, inode, *name = line.split()
        start, stop = (int(part, 16) for part in span.split("-"))
        if (start, stop) in spans:
            assert access.startswith("rw")
            assert inode == "0"
            assert not name
