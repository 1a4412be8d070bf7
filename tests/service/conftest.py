"""Checkpoints, their plain texts, and the time that no test of the service may exceed."""

import pytest
from tests.support.loops import run_test
from tests.support.models import save_pair

from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests of this folder run in one loop, in which the replicas that they share live."""
    from tests.service.support import run

    return run_test(pyfuncitem, run)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directories of a target and a good draft with random weights."""
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def plain(checkpoints):
    """Prompt and sampling to the tokens of plain decoding in one process: the oracle."""
    from tests.service.support import tiny_pair

    config = tiny_pair(checkpoints).model_copy(update={"draft": None})
    known = {}
    with LocalPipeline(config) as pipeline:

        def tokens(prompt, sampling: SamplingParams, stop=()):
            key = (prompt, sampling.model_dump_json(), stop)
            if key not in known:
                speculation = SpeculationParams(mode=Mode.PLAIN)
                known[key] = pipeline.generate(prompt, sampling, speculation, stop).result.token_ids
            return known[key]

        yield tokens
