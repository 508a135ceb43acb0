"""moexp: speculative decoding for mixture-of-experts models whose experts live in slow memory."""

__version__ = "0.1.0"
