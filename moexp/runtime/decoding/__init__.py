"""The decoding loop: propose, predict, select, prefetch, verify, commit."""
