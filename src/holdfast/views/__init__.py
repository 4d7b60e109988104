"""What is shown on a terminal, one file per view."""
