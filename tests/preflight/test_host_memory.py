"""KV pages by settings and by memory, and how much memory a machine says that it has."""

import pytest
from tests.support.models import pair

from paceline.checkpoint.files import Checkpoint
from paceline.config import DraftOptions, DraftSetup, TargetOptions, TargetSetup
from paceline.errors import ConfigError
from paceline.preflight.estimate import CODE_BYTES, target_estimate
from paceline.preflight.host_memory import available_bytes, draft_pages, fraction_pages, session_pages, target_pages
from paceline.types import MAX_DRAFT_TOKENS, PAGE_SIZE

GIB = 1 << 30


def draft_setup(**options):
    return DraftSetup.for_target(TargetSetup("x"), "y", DraftOptions(**options))


def test_pages_where_nothing_is_configured():
    per_session = -(-(1024 + MAX_DRAFT_TOKENS) // PAGE_SIZE)
    assert target_pages(TargetOptions(), 2048) == 16 * per_session
    assert target_pages(TargetOptions(max_sessions=1), 1 << 16) == session_pages(1 << 16), "one session of full length"
    assert target_pages(TargetOptions(kv_pages=5), 2048) == 5
    assert draft_pages(draft_setup(), 2048) == 16 * ((256 + 1024) // PAGE_SIZE + 1)
    assert draft_pages(draft_setup(max_sessions=48), 2048) == 3 * draft_pages(draft_setup(), 2048)
    assert draft_pages(draft_setup(tree_budget=64), 100) == 16 * (-(-164 // PAGE_SIZE) + 1)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_page_bytes_are_what_a_page_of_the_cache_takes(family):
    model, _ = pair(family)
    cache = model.runner(7).cache
    allocated = sum(pool.numel() * pool.element_size() for pool in (*cache.keys, *cache.values))
    assert allocated == 8 * model.size.page_bytes


def test_a_share_of_the_memory_becomes_pages():
    page = 1 << 20
    assert fraction_pages(0.5, 1024, page, GIB) == 511, "half of 1024 pages, one of them scratch"
    assert fraction_pages(1.0, 1024, page, GIB) == 1023
    needed = session_pages(1024)
    assert fraction_pages(1.0, 1024, page, (needed + 1) * page) == needed


def test_a_share_too_small_for_one_session_is_refused_with_the_numbers():
    page, needed = 1 << 20, session_pages(4096)
    with pytest.raises(ConfigError) as caught:
        fraction_pages(0.05, 4096, page, GIB)
    message = str(caught.value)
    assert message.startswith("kv_fraction is 0.05: that share of the 1.00 GiB left by weights and workspace holds")
    assert f"50 KV pages of {page} bytes, but one session of 4096 tokens needs {needed}" in message
    longest = 50 * PAGE_SIZE - MAX_DRAFT_TOKENS
    assert message.endswith(f"raise kv_fraction to at least 0.065 or lower max_model_len to at most {longest}")
    assert fraction_pages(0.065, 4096, page, GIB) >= needed
    assert fraction_pages(0.05, longest, page, GIB) == 50
    with pytest.raises(ConfigError, match=r"the model needs a machine with more memory$"):
        fraction_pages(0.5, 4096, page, 2 * page)


def test_build_sizes_the_cache_by_the_memory_left(tmp_path, monkeypatch):
    from paceline.preflight import device as preflight
    from paceline.target import build

    model, _ = pair("llama")
    page = model.size.page_bytes
    monkeypatch.setattr(build, "load_model", lambda *given, **how: model)
    monkeypatch.setattr(Checkpoint, "open", lambda source, trusted: Checkpoint(source, 2048, (), 128))
    setup = TargetSetup("x", TargetOptions(kv_fraction=0.5))
    reserved = target_estimate(setup, model.size, model.max_len).reserved_bytes
    assert reserved > CODE_BYTES, "and what the largest step allocates"
    monkeypatch.setattr(preflight, "available_bytes", lambda: reserved + 200 * page)
    engine = build.build_target_engine(setup, lambda events: None)
    assert engine.runner.cache.num_pages == 99
    monkeypatch.setattr(preflight, "available_bytes", lambda: reserved + 20 * page)
    with pytest.raises(ConfigError, match=r"^kv_fraction is 0.5: that share of the 0.00 GiB left"):
        build.build_target_engine(setup, lambda events: None)


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       4194304 kB\nMemFree:         100 kB\nMemAvailable:   3145728 kB\n"


def test_memory_without_a_limit(tmp_path):
    root = machine(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user\n"})
    assert available_bytes(root) == 3 * GIB
    machine(root, {"sys/fs/cgroup/user/memory.max": "max\n", "sys/fs/cgroup/user/memory.current": "5\n"})
    assert available_bytes(root) == 3 * GIB


def test_memory_within_a_control_group(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": str(2 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(GIB),
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
        "sys/fs/cgroup/pod/box/memory.max": "max",
        "sys/fs/cgroup/pod/box/memory.current": "1",
    }
    root = machine(tmp_path, files)
    assert available_bytes(root) == 2 * GIB - GIB // 2
    machine(root, {"sys/fs/cgroup/pod/memory.current": str(3 * GIB)})
    assert available_bytes(root) == 0, "above the limit"


def test_memory_within_a_control_group_of_the_first_version(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 4),
    }
    root = machine(tmp_path, files)
    assert available_bytes(root) == GIB - GIB // 4
    machine(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
    assert available_bytes(root) == 3 * GIB


def test_this_machine_has_memory(tmp_path):
    assert available_bytes() > 0
    with pytest.raises(ConfigError, match="give kv_pages, not kv_fraction"):
        available_bytes(tmp_path)
