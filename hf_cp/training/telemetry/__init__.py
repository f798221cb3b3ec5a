"""A run's numbers: measured (meter.py), summed up (scalars.py), logged and written (callback.py, records.py)."""
