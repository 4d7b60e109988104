"""``holdfast tune``: which settings of a loader are best here, found by trying them."""
