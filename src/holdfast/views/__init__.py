"""How things look: on a terminal, one view a file."""
