"""Training of draft heads: EAGLE-3, MTP, GTO."""
