"""What a worker leaves behind when it dies."""
