"""Bad samples: how they are recognised, skipped or replaced, and listed for later runs."""
