"""Workers that are actors of a Ray cluster (``worker_method="ray"``)."""
