"""Bad samples: what they are, what becomes of them, and the list that outlives the run."""
