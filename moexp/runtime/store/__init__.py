"""Where experts are and how they arrive: disk, host memory or resident; slots, policies, transfers, counters."""
