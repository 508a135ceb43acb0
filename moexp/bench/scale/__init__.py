"""Decoding a checkpoint larger than memory."""
