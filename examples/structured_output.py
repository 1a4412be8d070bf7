"""Output that must be one of some texts, or match a regular expression: bound token by token, with drafting.

python examples/structured_output.py
"""

from paceline.checkpoint.files import embedded_paths
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.local import LocalPipeline


def choose(pipeline: LocalPipeline, prompt: str, choices: list[str]) -> str:
    """One of the choices."""
    form = {"choice": choices}
    return pipeline.generate(prompt, max_tokens=32, temperature=0.0, structured_output=form).result.text


def match(pipeline: LocalPipeline, prompt: str, regex: str) -> str:
    """Text that the regular expression matches as a whole."""
    form = {"regex": regex}
    return pipeline.generate(prompt, max_tokens=64, temperature=0.0, structured_output=form).result.text


def main() -> None:
    """Asks the embedded pair twice."""
    target, draft = map(str, embedded_paths())
    with LocalPipeline(LocalConfig(target=TargetModel(path=target), draft=DraftModel(path=draft))) as pipeline:
        print(choose(pipeline, "def is_even(n):\n    return n % 2 ", ["== 0", "!= 0"]))
        print(match(pipeline, "VERSION = ", r'"[0-9]\.[0-9]\.[0-9]"'))


if __name__ == "__main__":
    main()
