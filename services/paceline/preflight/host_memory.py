"""Free memory of this machine, and the number of KV pages that fit into it. Plain numbers: starts without torch.

Called by both checks, ``preflight.service`` and ``preflight.device``, by the estimates, and by the builders.
"""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.size import gib
from paceline.config import DraftSetup, Growing, TargetOptions
from paceline.errors import ConfigError
from paceline.types import MAX_DRAFT_TOKENS, PAGE_SIZE, pages_for

DEFAULT_SESSION_TOKENS = 1024
"""Positions per session that the KV cache is sized for where nothing is configured."""
MEASURED_LEAVES = 32
"""Tree nodes per forward that a draft tries at most when it measures how many it can afford."""

_NODES_OF_BRANCH = 16
"""Nodes of a tree for each branch that has room: unlikely nodes are not expanded, and first children need no branch."""
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number about this large."""


def session_pages(max_len: int) -> int:
    """Pages of one session at ``max_len`` tokens with a proposal in flight."""
    return pages_for(max_len + MAX_DRAFT_TOKENS)


def target_pages(options: TargetOptions, max_len: int) -> int:
    """KV pages of a target for contexts of up to ``max_len`` tokens, unless kv_fraction decides."""
    typical = session_pages(min(max_len, DEFAULT_SESSION_TOKENS))
    return options.kv_pages or max(session_pages(max_len), options.max_sessions * typical)


def draft_pages(setup: DraftSetup, max_len: int, branches: int = 0) -> int:
    """KV pages of a draft model: contexts and speculation trees of all its sessions, with ``branches`` each."""
    return setup.num_sessions * draft_session_pages(setup.options, min(max_len, DEFAULT_SESSION_TOKENS), branches)


def draft_session_pages(options: Growing, num_tokens: int, branches: int = 0) -> int:
    """KV pages of one session of a draft model: of its context and its tree, which may both end inside a page, and one
    for each branch."""
    return pages_for(options.tree_budget + num_tokens) + 1 + branches


def draft_branches(options: Growing, *, linear: bool) -> int:
    """Branches that a session of a draft model with linear layers has room for (``drafters/branch_rows.py``), and
    takes more of where others have fewer. 0: the model has no such layers."""
    return 1 + options.tree_budget // _NODES_OF_BRANCH if linear else 0


def fraction_pages(kv_fraction: float, max_len: int, page_bytes: int, left_bytes: int) -> int:
    """KV pages that fit ``kv_fraction`` of ``left_bytes``, the scratch page included: of what all else leaves.

    Raises:
        ConfigError: not even one session of ``max_len`` tokens fits.
    """
    num_pages = int(kv_fraction * left_bytes) // page_bytes - 1
    needed = session_pages(max_len)
    if num_pages >= needed:
        return num_pages
    remedies = []
    enough = (needed + 1) * page_bytes / max(left_bytes, 1)
    if enough <= 1:
        remedies.append(f"raise kv_fraction to at least {-(-enough * 1000 // 1) / 1000:g}")
    longest = num_pages * PAGE_SIZE - MAX_DRAFT_TOKENS
    if longest >= 2:
        remedies.append(f"lower max_model_len to at most {longest}")
    raise ConfigError(
        f"kv_fraction is {kv_fraction:g}: that share of the {gib(left_bytes)} left by weights and workspace holds "
        f"{max(num_pages, 0)} KV pages of {page_bytes} bytes, but one session of {max_len} tokens needs {needed}: "
        + (" or ".join(remedies) or "the model needs a machine with more memory")
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that a new process could still use on this machine, within the limits of its cgroup.

    Raises:
        ConfigError: the system does not tell.
    """
    meminfo = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines())
    if "MemAvailable" not in meminfo:
        raise ConfigError("/proc/meminfo does not say how much memory is available: give kv_pages, not kv_fraction")
    left = int(meminfo["MemAvailable"].split()[0]) * 1024
    for limit, usage in _cgroups(root):
        left = min(left, limit - usage)
    return max(left, 0)


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """(limit, usage) in bytes of every cgroup above this process that limits memory; usage without file cache."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        leaf = Path(path.lstrip("/"))
        for folder in (base / leaf, *(base / parent for parent in leaf.parents)):
            limit, usage = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
            if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
                stat = dict(pair for row in _read(folder / "memory.stat").splitlines() if len(pair := row.split()) == 2)
                found.append((int(limit), max(int(usage) - int(stat.get(names[2], 0)), 0)))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
