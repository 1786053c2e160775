"""One file per way to measure, behind the contract in `base.py`."""
