"""What a dataset consists of, read without running its code."""
