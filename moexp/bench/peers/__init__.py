"""moexp beside other runtimes on the same weights."""
