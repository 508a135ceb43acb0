"""Measurements behind the tables: interleaved runs on platforms, the tables of a paper, and the choice of K, tau, B."""
