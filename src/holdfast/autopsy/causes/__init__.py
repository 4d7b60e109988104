"""The entries of the catalogue, grouped by what runs out or breaks."""
