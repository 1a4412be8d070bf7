"""Drafting heads: small modules that draft from the target's own hidden states, in their published formats."""
