"""Doors to other ecosystems, each behind the extra of its name."""
