"""The kernels that matter on a GPU, in Triton: one file per family, launched with given blocks.

No kernel tunes itself: block sizes are arguments, with defaults in each module.
Importing this package imports nothing of Triton; its modules do.
"""
