"""Ranks of one replica run one version of Paceline: its bits are those of one version."""

import pytest

from paceline import __version__
from paceline.cluster.rank_actors import Rank
from paceline.config import LogConfig
from paceline.errors import ConfigError


def test_a_rank_of_another_version_than_the_first_is_refused() -> None:
    """The mutant that compares nothing would sum the parts of two versions."""
    with pytest.raises(ConfigError, match=f"^rank 1 of t runs Paceline {__version__}, its first rank 0.0.9: one is"):
        Rank("rank 1 of t", LogConfig(), "0.0.9")
