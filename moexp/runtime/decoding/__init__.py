"""Decoding loops: propose, predict, select, prefetch, verify, commit."""
