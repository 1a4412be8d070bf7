"""Paceline: lossless speculative decoding, with drafting hidden behind verification.

Importing this package loads neither torch nor transformers: worker processes set their thread limits first.
"""

__version__ = "0.1.0"
