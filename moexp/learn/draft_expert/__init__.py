"""DraftExpert's self-distillation."""
