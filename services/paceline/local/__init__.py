"""One target and one draft on this machine, as an iterator of text: a router over the engines of this process."""

from paceline.local.pipeline import LocalGeneration as LocalGeneration
from paceline.local.pipeline import LocalPipeline as LocalPipeline
