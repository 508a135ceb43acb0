"""Recipes: YAML files read into frozen sections, and the folders that a recipe stands for."""
