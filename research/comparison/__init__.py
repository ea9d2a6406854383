"""The parts of ``research/compare_objectives.py``."""
