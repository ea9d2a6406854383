"""The parts of ``scripts/compare_objectives.py``."""
