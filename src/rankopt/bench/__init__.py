"""Timing of arms in turns, and the A/B built on it."""
