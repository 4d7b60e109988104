"""Where batches live: the arena, the codec that fills and reads it, collation into it."""
