"""Generated from protos/paceline/v1 by ``make protos``; never edited."""
