"""Writes the manifests that have their source elsewhere: the Serve configs of ``cluster/`` as patches of overlays, and
the Grafana dashboard.

    python k8s/generate.py            writes            --check   exit status 1 if a file is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from dashboard import dashboard_json

HERE = Path(__file__).parent
SERVE_CONFIGS = {"small": "serve-small.yaml", "gpu": "serve-gpu.yaml"}
"""Overlay -> file in ``cluster/``."""


_DRAFTS = "            min_replicas: 0  # without a draft the targets decode plainly\n            initial_replicas: 1\n"
_TWO_DRAFTS = "            min_replicas: 2\n"


def serve_patch(name: str, change: Callable[[str], str] = str) -> str:
    """The Serve config of ``cluster/``, word for word but for ``change``, as a patch of the RayService."""
    text = change((HERE.parent / "cluster" / name).read_text(encoding="utf-8"))
    indented = "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
    return (
        f"# Written by k8s/generate.py from cluster/{name}.\n"
        "apiVersion: ray.io/v1\nkind: RayService\nmetadata: {name: paceline}\nspec:\n  serveConfigV2: |\n" + indented
    )


def redundant(text: str) -> str:
    """The Serve config of the overlay ``ha``: two targets and two drafts at least."""
    for old, new in (("            min_replicas: 1\n", "            min_replicas: 2\n"), (_DRAFTS, _TWO_DRAFTS)):
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is {text.count(old)} times in the Serve config: it must be once")
        text = text.replace(old, new)
    return text


def generated() -> dict[Path, str]:
    """What each file has to hold."""
    files = {HERE / "overlays" / overlay / "serve.yaml": serve_patch(name) for overlay, name in SERVE_CONFIGS.items()}
    files[HERE / "overlays" / "ha" / "serve.yaml"] = serve_patch(SERVE_CONFIGS["gpu"], redundant)
    files[HERE / "components" / "monitoring" / "paceline.json"] = dashboard_json()
    return files


def main(check: bool) -> int:
    """See the module's docstring."""
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(HERE.parent)} {'is not what k8s/generate.py writes' if check else 'written'}")
        if not check:
            path.write_text(generated()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
