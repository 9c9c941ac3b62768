"""C++ kernels for the CPU: built once per machine, each with a reference and a parity grid."""
