"""Loading every sample once, to find the bad ones: `holdfast scan`."""
