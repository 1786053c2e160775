"""Energy accounting: samplers read the device, attribution credits joules, the ledger keeps them.

Rule of this package: measured = idle + credited + residual for every interval, and what is unknown is None, never 0.
"""
