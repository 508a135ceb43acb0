"""Everything that trains: corpora a model writes itself, distillation, routing traces."""
