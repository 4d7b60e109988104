"""Workers that are threads of the trainer (``worker_method="thread"``)."""
