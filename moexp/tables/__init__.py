"""From raw records to tables and figures; nothing here runs a model."""
