"""Sharding: which rank holds which part of which table.

`topology` and `tables` say what there is, `memory` what a shard takes, `planner` asks torchrec's
planner for one setting, `alternatives` for several and chooses, `remedies` says what would make a
plan fit that does not.
"""
