"""The kernels that matter on a GPU, in Triton: one file per family, launched with given blocks.

No kernel tunes itself: block sizes are arguments, which `rankopt.kernels.triton.tune` chooses.
Importing this package imports nothing of Triton; its modules do.
"""
