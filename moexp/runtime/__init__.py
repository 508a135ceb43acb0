"""Serving experts and decoding with them."""
