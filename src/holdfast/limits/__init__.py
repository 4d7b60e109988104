"""How much memory batches and workers may take, and how near the end of it is."""
