"""A virtual machine: cycles of steps over a virtual store and link; times and counters come of it."""
