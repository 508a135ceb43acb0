"""Routing traces: recording and statistics."""
