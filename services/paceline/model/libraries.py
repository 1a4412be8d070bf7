"""Settings of torch's libraries under which their products keep one order of summation on processors with AMX.

There oneDNN's products by tiles and MKL's float32 products depend on the number of rows. So a verified token would have
other bits than a decoded one. Without AMX, and in MKL's strict mode, they keep the rules of ``shapes.py``. Our own
products (``compiled/linear.py``) use AMX with one order for any number of rows.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from paceline.core.native import has_amx

SETTINGS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_CBWR": "AUTO,STRICT"}
"""Environment variables, which the libraries read at their first product."""


def keep_order(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the settings that are not set yet, on a processor with AMX. Processes that are started later
    inherit them.
    """
    if has_amx():
        for name, value in SETTINGS.items():
            environment.setdefault(name, value)
