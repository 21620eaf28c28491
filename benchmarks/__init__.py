"""Measurements with a goal: `python -m benchmarks.TOPIC` prints one JSON object per bar."""
