"""DraftExpert's tables and figures."""
