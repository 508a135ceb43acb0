"""Simulation from recorded routing: platforms with their costs, a virtual machine, studies and their validation.

platforms     constants of a platform and its model; what follows: a machine to simulate
machine       the link, store and steps of that machine under a virtual clock
routing       recordings and traces as blocks, cut to the cycles of any setting
studies       `moexp simulate`: tables and sweeps
validation    `moexp simulate --validate`: recorded runs replayed, priced by probes
calibration   `moexp calibrate`: this machine's constants
"""
