"""Workers that are processes, and everything that only they need."""
