"""The jobs that the Python API and the command line share: optimize, compare, run."""
