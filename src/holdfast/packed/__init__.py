"""Containers that all workers share in one copy."""
