"""Drafters: which tokens might come next. `draft_tree` is pure; the others run the target or a head on its states."""
