"""The model under both engines: transformers' own code, our KV cache and attention, eager or compiled.

Knows nothing of sessions, speculation or sampling: tokens, positions and KV rows in, logits out.
"""

from paceline.model.libraries import keep_order

keep_order()
