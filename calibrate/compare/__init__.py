"""Predictions beside what was measured or published."""
