"""Runs that survive a kill: checkpoints within a run, its working folder, journal, goodput."""
