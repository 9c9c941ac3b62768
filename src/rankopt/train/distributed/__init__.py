"""Training over several ranks: who they are, what they exchange, how they are launched."""
