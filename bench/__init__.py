"""Measurements, one script per question: ``python -m bench.quality``. Each writes a JSON file to bench/results."""
