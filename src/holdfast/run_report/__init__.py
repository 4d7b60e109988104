"""The report of a run: one HTML page, made from its logbook."""
