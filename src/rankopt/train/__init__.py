"""Make honest checkpoints: a small trainer, not a training system."""
