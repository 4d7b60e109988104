"""The engine: a pure machine that decides, and thin drivers that act."""
