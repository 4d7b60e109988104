"""A worker's side of loading, whatever kind of worker it is."""
