"""Client libraries against one server of the chat checkpoint: ``make test-clients``.

The libraries see nothing of this package: ``make clients`` installs them in ``build/clients``, and they talk over HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.clients.checkpoint import save_chat_checkpoint
from tests.clients.server import serving
from tests.support.fetch_tokenizers import FOLDER

HERE = Path(__file__).parent
HOME = Path("build/clients").resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("arguments", nargs="*", help="arguments of pytest; with them the Node clients do not run")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(_served())
        failed = _python(url, args.arguments)
        if not args.arguments:
            failed |= _node(url)
    raise SystemExit(failed)


def _served() -> contextlib.AbstractContextManager[str]:
    tokenizer = FOLDER / "qwen3"
    draft = save_chat_checkpoint(HOME / "checkpoints" / "draft", tokenizer, seed=1)
    chat = save_chat_checkpoint(HOME / "checkpoints" / "chat", tokenizer)
    return serving(chat, "--draft", str(draft), names=("chat",))


def _python(url: str, arguments: list[str]) -> int:
    command = [str(HOME / "bin" / "python"), "-m", "pytest", "-q", "--durations", "5", *arguments]
    environment = {**os.environ, "CLIENTS_URL": url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.run(command, cwd=HERE / "python", env=environment, check=False).returncode


def _node(url: str) -> int:
    folder = HOME / "node"  # the packages are here
    shutil.copy(HERE / "node" / "clients.test.js", folder)
    environment = {**os.environ, "CLIENTS_URL": url, "AI_SDK_LOG_WARNINGS": "false"}
    return subprocess.run(["node", "--test"], cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
