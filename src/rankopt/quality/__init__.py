"""Ranking quality: metrics of one arm, and paired comparison of two."""
