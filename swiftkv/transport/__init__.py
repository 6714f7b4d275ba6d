"""Moves KV bytes between pools. Decides nothing."""
