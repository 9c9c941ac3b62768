"""What a run depends on, written down, and the same run again."""
