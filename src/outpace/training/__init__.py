"""Trains what methods need of a target, on text that the target writes itself."""
