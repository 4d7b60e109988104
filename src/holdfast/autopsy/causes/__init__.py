"""The entries of the catalogue, by what it is that runs out or breaks."""
