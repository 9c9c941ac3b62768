"""What rows hold, and how they differ from others: nulls, ids, drift, labels, requests."""
